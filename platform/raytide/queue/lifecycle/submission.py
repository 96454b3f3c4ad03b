"""Checks a job's spec at submission, and fills in the fields that the user leaves to raytide.

- The planner fills in the automatic fields of a training. Its predictions are corrected by measurements of the
  cluster's earlier trainings. A training that cannot fit its GPUs is refused.
- A deadline is refused if it cannot be met.
- A request for GPU memory, such as "GPUs with 40 GB each", becomes a label selector of the node types that have it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from raytide.core.clock import Clock, moment
from raytide.core.errors import CapacityError, ConfigError, DataError, RaytideError, UsageError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import TYPE_LABEL, CapacityType, NodeType, labels_match
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Store
from raytide.scheduling.diagnosis import why_impossible
from raytide.sizing.calibration import Corrections, MeasuredRun, learn
from raytide.sizing.devices import device_of, gpu_memory_gb
from raytide.sizing.model_shape import ModelShape
from raytide.sizing.search.automatic import fill_in
from raytide.sizing.search.fixes import check_training
from raytide.sizing.workload import Strategy, TrainWorkload

ReadConfig = Callable[[TrainSpec], Mapping[str, object] | None]
"""A function that returns the `config.json` of the model that a spec trains; None if it cannot be read."""
_JOBS = 200
"""The number of newest jobs from which corrections are learned."""
_LEAST_STEPS = 20
"""The least steps of a run to learn from; a shorter one would mostly measure its start."""
_EVERY_S = 60.0

ReadConfigOfJob = Callable[[TrainSpec, Job], Mapping[str, object] | None]
"""A function that returns the `config.json` of the model that a job trained; None if it cannot be read."""


def plan_training(
    job: JobSpec,
    spec: TrainSpec,
    node_types: Sequence[NodeType],
    read_config: ReadConfig,
    learned: Callable[[], Corrections] = Corrections,
) -> tuple[JobSpec, TrainSpec]:
    """Returns a training job and its TrainSpec with the automatic fields filled in.

    `learned` returns corrections of the planner that were measured in earlier runs. Raises CapacityError, with the
    cheapest fix, if the training cannot fit its GPUs.

    The model's files may be unreadable here. In that case a spec with automatic fields raises ConfigError. A spec
    without automatic fields is returned unchecked, and the driver will report any errors.
    """
    if not spec.auto and not any(shape.resources.get("GPU") for shape in job.gang.shapes):
        return job, spec
    model = model_of(spec, read_config)
    if model is None:
        if spec.auto:
            raise ConfigError(
                f"{job.name} leaves {' and '.join(spec.auto)} to the planner, which cannot read its model's config.",
                hint="Give model.config or the dataset as files that the API can read, or set these fields.",
            )
        return job, spec
    if not spec.auto:
        check_training(spec, model, _without_spares(job.gang.shapes, spec.spares), node_types)
        return job, spec
    if "gang" in spec.auto:
        filled = fill_in(spec, model, node_types, learned())
        return job.model_copy(update={"config": filled.model_dump(mode="json"), "gang": filled.asks}), filled
    whole = job.gang.model_copy(update={"shapes": tuple(_without_spares(job.gang.shapes, spec.spares))})
    filled = fill_in(spec.model_copy(update={"gang": whole}), model, node_types, learned())
    filled = filled.model_copy(update={"gang": spec.gang})
    return job.model_copy(update={"config": filled.model_dump(mode="json")}), filled


def _without_spares(shapes: Sequence[Shape], spares: int) -> list[Shape]:
    return [shape.model_copy(update={"members": max(1, shape.members - spares)}) for shape in shapes]


def model_of(spec: TrainSpec, read_config: ReadConfig) -> ModelShape | None:
    """Returns the sizes of the model that a spec trains. Returns None if they cannot be determined here."""
    from raytide.actors.models.architecture import model_shape
    from raytide.actors.models.families import architecture_of

    try:
        config = read_config(spec)
        return None if config is None else model_shape(architecture_of(config, spec.name), spec.name)
    except (ConfigError, DataError):
        return None  # the driver says what is wrong with it


class LearnedCorrections:
    """Corrections of predicted step times and activations. They are learned from successful trainings that ran on nodes
    of a single type.

    The store is searched for new trainings at most once a minute.
    """

    def __init__(
        self, store: Store, node_types: Sequence[NodeType], read_config: ReadConfigOfJob, clock: Clock
    ) -> None:
        self._store, self._read_config, self._clock = store, read_config, clock
        self._types = {node_type.name: node_type for node_type in node_types}
        self._lock = threading.Lock()
        self._runs: dict[str, MeasuredRun | None] = {}
        self._found, self._at_s = Corrections(), float("-inf")

    def current(self) -> Corrections:
        with self._lock:
            if self._clock.now_s() - self._at_s >= _EVERY_S:
                self._at_s = self._clock.now_s()
                self._refresh()
            return self._found

    def _refresh(self) -> None:
        finished = {
            job.id: job
            for job in self._store.jobs(limit=_JOBS)
            if job.spec.kind is JobKind.TRAIN and job.state is JobState.SUCCEEDED
        }
        new = [job for job in finished.values() if job.id not in self._runs]
        if new:
            type_of = {node.id: node.type for node in self._store.nodes()}
            self._runs |= {job.id: self._measured(job, type_of) for job in new}
        self._runs = {job_id: run for job_id, run in self._runs.items() if job_id in finished}
        self._found = learn(run for run in self._runs.values() if run is not None)

    def _measured(self, job: Job, type_of: Mapping[str, str]) -> MeasuredRun | None:
        lease = self._store.lease_of(job.id)
        types = {type_of.get(member.node_id or "") for member in lease.members} - {None} if lease is not None else set()
        node_type = self._types.get(types.pop() or "") if len(types) == 1 else None
        return None if node_type is None else measured_run(job, node_type, self._read_config)


def measured_run(job: Job, node_type: NodeType, read_config: ReadConfigOfJob) -> MeasuredRun | None:
    """Returns the measurements of a training that ran on nodes of this type. Returns None if they cannot be compared
    with a prediction.
    """
    device = device_of(node_type)
    step_s, world, steps = (job.progress_number(name) for name in ("step_s", "world", "step"))
    if device is None or not step_s or not world or (steps or 0) < _LEAST_STEPS:
        return None
    try:
        spec = TrainSpec.parse(job.spec.config, where=job.id)
        model = model_of(spec, lambda each: read_config(each, job))
        if model is None:
            return None
        workload, strategy = TrainWorkload.from_spec(spec, model), Strategy.from_spec(spec, int(world))
    except RaytideError:
        return None
    shapes = job.spec.gang.shapes
    devices = max(1, int(shapes[0].resources.get("GPU", 1.0))) if shapes else 1
    return MeasuredRun(workload, strategy, device, devices, step_s, job.progress_number("peak_bytes") or None)


def resolve_deadline(spec: JobSpec, node_types: Sequence[NodeType], now_s: float) -> JobSpec:
    """Returns the job's spec with its deadline as an absolute time.

    Raises UsageError if the time until the deadline is too short, and CapacityError if on-demand nodes alone could not
    hold the gang.
    """
    if spec.deadline is None:
        return spec
    deadline = spec.deadline
    if isinstance(deadline, timedelta):
        deadline = datetime.fromtimestamp(now_s, tz=UTC) + deadline
    left_s = deadline.timestamp() - now_s
    if left_s <= 0:
        raise UsageError(
            f"the deadline of {spec.name}, {moment(deadline.timestamp())}, is past.", hint="Name a later one."
        )
    if spec.estimate_h is not None and spec.estimate_h * 3600.0 > left_s:
        raise UsageError(
            f"{spec.name} cannot be done by {moment(deadline.timestamp())}: it needs {spec.estimate_h:g} h by its own "
            f"estimate, even on demand, and there are {left_s / 3600:.1f} h.",
            hint="Name a later deadline, or a larger gang with a smaller estimate_h.",
        )
    if not any(_fits_on_demand(shape, node_types) for shape in spec.gang.shapes):
        raise CapacityError(
            f"no deadline can be promised for {spec.name}: on-demand nodes alone could not hold its gang.",
            hint="Add on-demand nodes that hold it, allow them in the shape's labels, or leave the deadline out.",
        )
    return spec.model_copy(update={"deadline": deadline})


def _fits_on_demand(shape: Shape, node_types: Sequence[NodeType]) -> bool:
    """Returns True if an empty fleet of on-demand nodes could hold the shape's minimum of members."""
    on_demand = [each for each in node_types if each.market is CapacityType.ON_DEMAND]
    return why_impossible(shape, shape.at_least, on_demand, "it") is None


def select_gpu_memory(gang: GangSpec, node_types: Sequence[NodeType], *, subject: str) -> GangSpec:
    """Replaces each shape's `gpu_memory_gb` by a label selector. The selector allows the node types whose GPUs have
    that much memory. Returns the changed gang.

    Raises CapacityError if a shape's labels allow none of these node types.
    """
    if all(shape.gpu_memory_gb is None for shape in gang.shapes):
        return gang
    shapes = tuple(_selected(shape, node_types, subject) for shape in gang.shapes)
    return gang.model_copy(update={"shapes": shapes})


def _selected(shape: Shape, node_types: Sequence[NodeType], subject: str) -> Shape:
    if shape.gpu_memory_gb is None:
        return shape
    allowed = [each for each in node_types if any(labels_match(shape.labels, each.all_labels(z)) for z in each.zones)]
    known = {each.name: memory for each in allowed if (memory := gpu_memory_gb(each)) is not None}
    enough = sorted(name for name, memory in known.items() if memory >= shape.gpu_memory_gb)
    if not enough:
        most = max(known.values(), default=0.0)
        has = f"the largest have {most:g} GB" if known else "none has GPUs of known memory"
        raise CapacityError(
            f"no node type fits {subject}: needs GPUs with {shape.gpu_memory_gb:g} GB; {has}.",
            hint="Ask for less, add a node type, or declare gpu_memory_gb in metadata.raytide.node_types.",
        )
    wanted = enough[0] if len(enough) == 1 else f"in({','.join(enough)})"
    return shape.model_copy(update={"labels": {**shape.labels, TYPE_LABEL: wanted}, "gpu_memory_gb": None})
