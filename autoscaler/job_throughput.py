"""How many steps a job makes on each type of node: its stride, in steps a second of one GPU, from the `step` that its
driver reports. And so how fast each job is on the node types, measured, else as their `speed` says.

Only stretches count in which its gang stayed as it was, with all its members on nodes of one type.
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
"""Stretches: so many must have been seen on a type, so many of the last are remembered."""

Learned = Mapping[str, Mapping[str, float]]
"""By job and node type."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A step that was seen being made."""

    gang: tuple[str, int]
    """The lease and its epoch: a gang that changed begins anew."""
    step: float
    at_s: float
    is_edge: bool
    """Seen as it was made; else it is not known since when the job stands there."""


@dataclass(slots=True)
class _Meter:
    """Of one job."""

    learned: dict[str, float] = field(default_factory=dict)
    """By node type; as another controller learned it, until there is enough of our own."""
    seen: dict[str, deque[float]] = field(default_factory=dict)
    mark: _Mark | None = None
    paces: Throughputs | None = None
    """What follows from `learned`, once it was asked for."""

    def observe(self, gang: tuple[str, int], node_type: str, gpus: float, step: float, at_s: float) -> None:
        mark = self.mark
        if mark is None or mark.gang != gang or step < mark.step or at_s < mark.at_s:
            self.mark = _Mark(gang, step, at_s, is_edge=False)
        elif step > mark.step and not mark.is_edge:
            self.mark = _Mark(gang, step, at_s, is_edge=True)
        elif step > mark.step and at_s - mark.at_s >= STRETCH_S:
            strides = self.seen.setdefault(node_type, deque(maxlen=MOST))
            strides.append((step - mark.step) / (at_s - mark.at_s) / gpus)
            self.mark = _Mark(gang, step, at_s, is_edge=True)
            if len(strides) >= ENOUGH:
                self.learned, self.paces = {**self.learned, node_type: median(strides)}, None


class JobThroughput:
    """All jobs'. `known`: what was learned before."""

    def __init__(self, node_types: Sequence[NodeType], known: Learned | None = None) -> None:
        on_cpus, on_gpus = (
            AcceleratorClasses.of(node_types, {"CPU": 1.0}),
            AcceleratorClasses.of(node_types, {"GPU": 1.0}),
        )
        self._on = (on_cpus, on_cpus.paces({})), (on_gpus, on_gpus.paces({}))
        """By whether a job asks for GPUs; each with what their `speed` says."""
        self._kinds = len(on_cpus.declared)
        self._meters = {job_id: _Meter(dict(by_type)) for job_id, by_type in (known or {}).items()}

    @property
    def learned(self) -> Learned:
        return {job_id: meter.learned for job_id, meter in self._meters.items() if meter.learned}

    def observe(self, seen: Snapshot, now_s: float) -> None:
        there = {job.id for job in seen.jobs}
        self._meters = {job_id: meter for job_id, meter in self._meters.items() if job_id in there}
        if self._kinds < 2:
            return  # there is nothing to compare
        types = {view.node.id: view.node.type for view in seen.nodes}
        leases = {lease.job_id: lease for lease in seen.leases if lease.state is LeaseState.ACTIVE}
        for job in seen.jobs:
            lease, step = leases.get(job.id), job.progress_number("step")
            if lease is None or step is None or job.state is not JobState.RUNNING:
                continue
            if (node_type := _type_of(lease, types)) is not None:
                gpus = (lease.shape.gpus or 1.0) * len(lease.usable)  # who asks for neither GPU nor CPU: by member
                meter = self._meters.setdefault(job.id, _Meter())
                meter.observe((lease.id, lease.epoch), node_type, gpus, step, now_s)

    def paces(self, jobs: Iterable[Job]) -> dict[str, Throughputs]:
        """Of those that are not as fast everywhere, as far as is known."""
        found = ((job.id, self._of(job)) for job in jobs)
        return {job_id: paces for job_id, paces in found if paces}

    def _of(self, job: Job) -> Throughputs:
        kinds, said = self._on[any(shape.resources.get("GPU") for shape in job.spec.gang.shapes)]
        if (meter := self._meters.get(job.id)) is None or not meter.learned:
            return said
        if meter.paces is None:
            meter.paces = kinds.paces(meter.learned)
        return meter.paces


def _type_of(lease: Lease, types: Mapping[str, str]) -> str | None:
    """The one type on which all its members are."""
    if any(member.state is MemberState.LEAVING for member in lease.usable):
        return None
    there = {types.get(member.node_id) for member in lease.usable}
    return there.pop() if len(there) == 1 else None
