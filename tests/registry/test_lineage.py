from __future__ import annotations

import pytest

from raytide.core.errors import ConfigError, ConflictError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.specs.model_version import Lineage, ModelReference, ModelVersionSpec
from raytide.core.specs.train import TrainSpec
from raytide.registry.lineage import exported_model, with_lineage

GANG = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))


def job(kind: JobKind = JobKind.TRAIN, state: JobState = JobState.SUCCEEDED, **fields: object) -> Job:
    if kind is JobKind.TRAIN:
        given = {"dataset": "/data", "out": "/runs/7/", "steps": 5, **fields}
        fields = TrainSpec.model_validate(given).model_dump(mode="json")
    spec = JobSpec(kind=kind, name="job", gang=GANG, config=fields)
    return Job("job-7", spec, "ana", state, 1.0, progress={"loss": 2.5, "step": 5, "world": 4})


def model(location: str = "/runs/7/model", **fields: object) -> ModelVersionSpec:
    given = {"name": "chat", "location": location, "sha256": "a" * 64, **fields}
    return ModelVersionSpec.model_validate(given)


def test_a_training_job_tells_dataset_code_config_and_metrics() -> None:
    made = with_lineage(
        model(lineage=Lineage(job="x", dataset_sha256="d" * 64, dataset="/lie")), job(init_from="/base"), "raytide 1"
    )
    assert (made.lineage.job, made.lineage.dataset, made.lineage.base) == ("job-7", "/data", "/base")
    assert made.lineage.dataset_sha256 == "d" * 64
    assert made.lineage.code == "raytide 1"
    assert made.lineage.config["steps"] == 5
    assert made.metrics == {"train_loss": 2.5, "steps": 5.0}
    assert with_lineage(model(metrics={"ppl": 9.0, "train_loss": 1.0}), job(), "").metrics["train_loss"] == 1.0


def test_the_datasets_of_a_large_mixture_are_cut_to_what_the_registry_can_read() -> None:
    sources = [{"name": f"s{n}", "dataset": f"s3://tokens/web-{n}/{'x' * 80}"} for n in range(64)]
    made = with_lineage(model(), job(dataset={"sources": sources}), "")
    assert made.lineage.dataset.startswith("s3://tokens/web-0/")
    assert ModelVersionSpec.model_validate(made.model_dump(mode="json")) == made


def test_only_the_model_that_the_job_exported_is_its_own() -> None:
    assert exported_model(job()) == "/runs/7/model"
    with pytest.raises(ConfigError, match="exported its model to /runs/7/model, not /other"):
        with_lineage(model("/other"), job(), "")


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.FAILED, JobState.STOPPED])
def test_a_training_that_did_not_succeed_has_no_model(state: JobState) -> None:
    with pytest.raises(ConflictError, match=f"job-7 is {state}"):
        exported_model(job(state=state))


def test_a_training_that_exports_nothing_and_another_job_have_no_known_model() -> None:
    with pytest.raises(ConflictError, match="export: false"):
        exported_model(job(export=False))
    with pytest.raises(ConflictError, match="no training job"):
        exported_model(job(JobKind.SCRIPT, command=["x"]))


def test_a_script_tells_its_command_and_package_and_no_environment() -> None:
    script = job(JobKind.SCRIPT, command=["python", "x.py"], package="c" * 64, env={"TOKEN": "secret"})
    made = with_lineage(model("/anywhere", lineage=Lineage(dataset="/mine")), script, "raytide 1")
    assert (made.lineage.job, made.lineage.dataset, made.lineage.code) == ("job-7", "/mine", "c" * 64)
    assert made.lineage.config == {"command": ["python", "x.py"]}
    assert "secret" not in made.model_dump_json()


@pytest.mark.parametrize("text", ["chat:3", "registry:chat:3"])
def test_a_reference_names_a_version(text: str) -> None:
    assert ModelReference.parse(text) == ModelReference("chat", 3)
    assert str(ModelReference.parse("registry:a.b-c@champion")) == "a.b-c@champion"


@pytest.mark.parametrize("text", ["chat", "chat:", "chat@", "chat:x", "chat@3", "Chat:1", "a/b:1", "chat:1@x", ""])
def test_anything_else_is_no_reference(text: str) -> None:
    with pytest.raises(ConfigError, match="names no version"):
        ModelReference.parse(text)
