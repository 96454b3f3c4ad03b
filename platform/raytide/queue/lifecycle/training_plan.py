"""The planner at submission: fills in what a training leaves to it, and refuses one that cannot fit its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raytide.core.errors import ConfigError, DataError
from raytide.core.objects.gang import Shape
from raytide.core.objects.job import JobSpec
from raytide.core.objects.node import NodeType
from raytide.core.specs.train import TrainSpec
from raytide.sizing.calibration import Corrections
from raytide.sizing.model_shape import ModelShape
from raytide.sizing.search.automatic import fill_in
from raytide.sizing.search.fixes import check_training

ReadConfig = Callable[[TrainSpec], Mapping[str, object] | None]
"""It returns the `config.json` of the model that a spec trains; None if that cannot be read."""


def plan_training(
    job: JobSpec,
    spec: TrainSpec,
    node_types: Sequence[NodeType],
    read_config: ReadConfig,
    learned: Callable[[], Corrections] = Corrections,
) -> tuple[JobSpec, TrainSpec]:
    """Returns a training job and its spec with the automatic fields filled in. `learned` corrects the planner by what
    runs measured.

    Raises CapacityError for a training that cannot fit its GPUs, with the cheapest fix, and ConfigError for `auto` with
    a model that cannot be read here. Without `auto` such a training is not checked; its driver reports what is wrong.
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
    """Returns the sizes of the model that a spec trains; None if they are not known here."""
    from raytide.actors.models.architecture import model_shape
    from raytide.actors.models.families import architecture_of

    try:
        config = read_config(spec)
        return None if config is None else model_shape(architecture_of(config, spec.name), spec.name)
    except (ConfigError, DataError):
        return None  # the driver says what is wrong with it
