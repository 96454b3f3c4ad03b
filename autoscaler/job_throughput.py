"""The throughput of each job on each node type, in steps per second per GPU. It is measured from the `step` that the
job's driver reports. If there is no measurement, the node type's configured `speed` is used.

A measurement needs a period in which the gang does not change and all its members are on nodes of one type.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from raytide.core.objects.gang import Lease, LeaseState, MemberState
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.node import NodeType
from raytide.core.objects.snapshot import Snapshot, Throughputs
from raytide.scheduling.throughput import AcceleratorClasses

STRETCH_S = 60.0
ENOUGH, MOST = 3, 20
"""The number of stretches needed on a node type, and the number of the latest stretches that are kept."""

Learned = Mapping[str, Mapping[str, float]]
"""Steps per second and GPU, by job and node type."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The start of a stretch."""

    gang: tuple[str, int]
    """Lease id and epoch; a changed gang starts a new stretch."""
    step: float
    at_s: float
    is_edge: bool
    """True if the step began at `at_s`; else the job may have been at this step for longer."""


@dataclass(slots=True)
class _Meter:
    """The throughput meter of one job."""

    learned: dict[str, float] = field(default_factory=dict)
    """Steps per second and GPU by node type; an earlier controller's values until enough stretches are measured."""
    seen: dict[str, deque[float]] = field(default_factory=dict)
    mark: _Mark | None = None
    paces: Throughputs | None = None
    """The relative throughputs that follow from `learned`, cached."""

    def observe(self, gang: tuple[str, int], node_type: str, gpus: float, step: float, at_s: float) -> None:
        mark = self.mark
        if mark is None or mark.gang != gang or step < mark.step or at_s < mark.at_s:
            self.mark = _Mark(gang, step, at_s, is_edge=False)
        elif step > mark.step and not mark.is_edge:
            self.mark = _Mark(gang, step, at_s, is_edge=True)
        elif step > mark.step and at_s - mark.at_s >= STRETCH_S:
            steps_per_gpu_s = self.seen.setdefault(node_type, deque(maxlen=MOST))
            steps_per_gpu_s.append((step - mark.step) / (at_s - mark.at_s) / gpus)
            self.mark = _Mark(gang, step, at_s, is_edge=True)
            if len(steps_per_gpu_s) >= ENOUGH:
                self.learned, self.paces = {**self.learned, node_type: median(steps_per_gpu_s)}, None


class JobThroughput:
    """Measures the throughput of all jobs. `known` are the values that an earlier controller learned."""

    def __init__(self, node_types: Sequence[NodeType], known: Learned | None = None) -> None:
        on_cpus, on_gpus = (AcceleratorClasses.of(node_types, {name: 1.0}) for name in ("CPU", "GPU"))
        self._on = (on_cpus, on_cpus.relative({})), (on_gpus, on_gpus.relative({}))
        """The accelerator classes, and the throughputs by the configured `speed`, for jobs without GPUs and for jobs
        with GPUs.
        """
        self._kinds = len(on_cpus.declared)
        self._meters = {job_id: _Meter(dict(by_type)) for job_id, by_type in (known or {}).items()}

    @property
    def learned(self) -> Learned:
        return {job_id: meter.learned for job_id, meter in self._meters.items() if meter.learned}

    def observe(self, seen: Snapshot, now_s: float) -> None:
        job_ids = {job.id for job in seen.jobs}
        self._meters = {job_id: meter for job_id, meter in self._meters.items() if job_id in job_ids}
        if self._kinds < 2:
            return  # nothing to compare
        types = {view.node.id: view.node.type for view in seen.nodes}
        leases = {lease.job_id: lease for lease in seen.leases if lease.state is LeaseState.ACTIVE}
        for job in seen.jobs:
            lease, step = leases.get(job.id), job.progress_number("step")
            if lease is None or step is None or job.state is not JobState.RUNNING:
                continue
            if (node_type := _type_of(lease, types)) is not None:
                gpus = (lease.shape.gpus or 1.0) * len(lease.usable)  # by member if it asks for neither GPU nor CPU
                meter = self._meters.setdefault(job.id, _Meter())
                meter.observe((lease.id, lease.epoch), node_type, gpus, step, now_s)

    def paces(self, jobs: Iterable[Job]) -> dict[str, Throughputs]:
        """Returns, for each job, its relative throughputs by node type. Jobs that are equally fast on all types are
        left out.
        """
        found = ((job.id, self._of(job)) for job in jobs)
        return {job_id: paces for job_id, paces in found if paces}

    def _of(self, job: Job) -> Throughputs:
        accelerators, declared = self._on[any(shape.resources.get("GPU") for shape in job.spec.gang.shapes)]
        if (meter := self._meters.get(job.id)) is None or not meter.learned:
            return declared
        if meter.paces is None:
            meter.paces = accelerators.relative(meter.learned)
        return meter.paces


def _type_of(lease: Lease, types: Mapping[str, str]) -> str | None:
    """Returns the node type of all members, None if they differ."""
    if any(member.state is MemberState.LEAVING for member in lease.usable):
        return None
    job_ids = {types.get(member.node_id) for member in lease.usable}
    return job_ids.pop() if len(job_ids) == 1 else None
