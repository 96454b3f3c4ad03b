"""`raytide batch` submits jobs, and refuses wrong ones before it does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytide.core.errors import DataError, NotFoundError
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.specs.script import ScriptSpec
from raytide.sdk.client import Client


class FakeApi:
    """Keeps what is submitted. One endpoint exists, `chat`."""

    def __init__(self) -> None:
        self.submitted: list[JobSpec] = []

    def endpoint(self, name: str) -> Any:
        if name != "chat":
            raise NotFoundError(f"there is no endpoint {name}.")
        engine = {"max_running": 4, "dtype": "bfloat16"}
        spec = ServeSpec(name="chat", model="/models/chat", weights="/models/new", engine=engine)
        return SimpleNamespace(endpoint=SimpleNamespace(spec=spec))

    def model_version(self, reference: object) -> Any:
        assert str(reference) == "chat@champion"
        return SimpleNamespace(spec=SimpleNamespace(location="/models/champion"))

    def submit(self, spec: JobSpec) -> Any:
        self.submitted.append(spec)
        return SimpleNamespace(job=SimpleNamespace(id="job-1", spec=spec))


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def submitted(api: FakeApi, model: str, **options: Any) -> tuple[JobSpec, ServeSpec]:
    Client(api).batch("rows.jsonl", "out.jsonl", model=model, **options)  # type: ignore[arg-type]
    (job,) = api.submitted
    command = ScriptSpec.parse(job.config, where="job").command
    assert command[:3] == ("python", "-m", "raytide.actors.serving.batch")
    assert command[3:5] == (str(Path("rows.jsonl").resolve()), str(Path("out.jsonl").resolve()))
    return job, ServeSpec.parse(json.loads(command[5]), where="spec")


def test_a_batch_is_a_preemptible_job_of_low_priority(api: FakeApi, tmp_path: Path) -> None:
    job, spec = submitted(api, str(tmp_path), gpus=1, spot=True)
    assert (job.kind, job.name, job.priority, job.is_preemptible) == (JobKind.SCRIPT, "rows", "low", True)
    assert job.config["retries"] == 3
    assert (spec.model, spec.engine, spec.resources["GPU"]) == (str(tmp_path), {}, 1.0)


def test_its_options_can_say_otherwise(api: FakeApi, tmp_path: Path) -> None:
    job, _ = submitted(api, str(tmp_path), priority="high", preemptible=False, name="nightly")
    assert (job.name, job.priority, job.is_preemptible) == ("nightly", "high", False)


def test_an_endpoint_gives_its_directory_and_options(api: FakeApi) -> None:
    _, spec = submitted(api, "chat", engine={"dtype": "float32"})
    assert (spec.model, spec.engine) == ("/models/chat", {"max_running": 4, "dtype": "float32"})


def test_a_registered_model_gives_its_directory(api: FakeApi) -> None:
    _, spec = submitted(api, "registry:chat@champion")
    assert spec.model == "/models/champion"


@pytest.mark.parametrize(
    ("model", "out", "why"),
    [
        ("absent", "out.jsonl", "neither a directory nor an endpoint"),
        ("chat", "s3://bucket/out.jsonl", "is not a path"),
        ("chat", "./rows.jsonl", "is the input"),
    ],
)
def test_what_cannot_run_is_refused_before_it_is_queued(api: FakeApi, model: str, out: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        Client(api).batch("rows.jsonl", out, model=model)  # type: ignore[arg-type]
    assert api.submitted == []


def test_an_endpoint_gives_the_weights_that_it_serves_now(api: FakeApi) -> None:
    _, spec = submitted(api, "chat")
    assert (spec.model, spec.weights) == ("/models/chat", "/models/new")
