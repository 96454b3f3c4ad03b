"""Derives the lineage of a model from the record of the job that produced it. Compares two versions of a model or
dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raytide.core.bounds import shortened
from raytide.core.errors import ConfigError, ConflictError
from raytide.core.io.storage import join
from raytide.core.objects.job import Job, JobKind, JobState
from raytide.core.specs.data import DatasetVersion
from raytide.core.specs.model_version import Lineage, ModelVersion, ModelVersionSpec
from raytide.core.specs.script import ScriptSpec
from raytide.core.specs.train import TrainSpec

_MOST_LOCATION_CHARS = 4096
"""The length of a lineage's dataset; a mixture's 64 locations may be longer together."""
_REPORTED = {"loss": "train_loss", "step": "steps"}
"""The names of a version's metrics, by their names in the job's progress."""
Version = ModelVersion | DatasetVersion


def exported_model(job: Job) -> str:
    """Returns the directory of the model that a training job exported. Raises ConflictError if the job has exported
    none.
    """
    if job.spec.kind is not JobKind.TRAIN:
        raise ConflictError(
            f"{job.id} is no training job, so its model is not known.", hint="Name the directory, and the job with it."
        )
    spec = TrainSpec.parse(job.spec.config, where=job.id)
    if not spec.export:
        raise ConflictError(f"{job.id} exported no model: its spec says `export: false`.", hint="Train with `export`.")
    if job.state is not JobState.SUCCEEDED:
        raise ConflictError(
            f"{job.id} is {job.state}; it exports its model at the end.", hint="Wait until it succeeds."
        )
    return join(spec.out, "model")


def with_lineage(spec: ModelVersionSpec, job: Job, code: str) -> ModelVersionSpec:
    """Returns the spec of a model version, completed with lineage and metrics. They come from the record of the job
    that produced the model.

    `code` is the version of raytide's trainer. Metrics and a dataset digest that the spec already contains are kept.
    Raises ConfigError if the job did not produce this model.
    """
    given, config = spec.lineage, job.spec.config
    if job.spec.kind is JobKind.TRAIN:
        if spec.location.rstrip("/") != (exported := exported_model(job)):
            raise ConfigError(
                f"{job.id} exported its model to {exported}, not {spec.location}.", hint="Leave out one of the two."
            )
        train = TrainSpec.parse(config, where=job.id)
        lineage = Lineage(
            job=job.id,
            dataset=shortened(", ".join(train.datasets), _MOST_LOCATION_CHARS)
            or (train.chat.file if train.chat else ""),
            dataset_sha256=given.dataset_sha256,
            base=train.init_from or "",
            code=code,
            config=dict(config),
        )
    else:
        package = ScriptSpec.parse(config, where=job.id).package if job.spec.kind is JobKind.SCRIPT else ""
        command = {"command": config["command"]} if "command" in config else {}  # its environment may hold secrets
        lineage = given.model_copy(update={"job": job.id, "code": given.code or package, "config": command})
    reported = {
        name: float(value)
        for word, name in _REPORTED.items()
        if isinstance(value := job.progress.get(word), int | float)
    }
    return spec.model_copy(update={"lineage": lineage, "metrics": {**reported, **spec.metrics}})


@dataclass(frozen=True, slots=True)
class FieldChange:
    field: str
    """The path of the field, such as `lineage.config.optim.lr`."""
    before: object
    after: object


def differences(before: Version, after: Version) -> tuple[FieldChange, ...]:
    """Returns the fields that differ between two versions, sorted by name. The value of a missing field is None.

    The team, user and time of a version are not compared.
    """
    a, b = (dict(_leaves(each.spec.model_dump(mode="json", exclude={"team"}))) for each in (before, after))
    changed = sorted(field for field in a.keys() | b.keys() if a.get(field) != b.get(field))
    return tuple(FieldChange(field, a.get(field), b.get(field)) for field in changed)


def _leaves(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner
