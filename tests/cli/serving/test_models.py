"""model, endpoint and serve --rollback: the requests that they become, and what is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.cli.serving import serve as serve_module
from raytide.control.client import ApiClient
from raytide.control.views import EndpointStatus, RolloutStatus
from raytide.core.errors import DataError, NotFoundError, UsageError
from raytide.core.objects.endpoint import Endpoint, EndpointRevision, EndpointState, ServeSpec
from raytide.core.specs.model_version import (
    AliasChange,
    AliasSpec,
    Lineage,
    ModelReference,
    ModelVersion,
    ModelVersionSpec,
    RegisteredModel,
)
from raytide.core.specs.rollout import RevisionFeedback
from raytide.registry.content_digest import digest_of_directory

runner = CliRunner()


class Registry:
    """The API's registry, in memory."""

    def __init__(self) -> None:
        self.versions: list[ModelVersion] = []
        self.changes: list[AliasChange] = []

    def register_model(self, spec: ModelVersionSpec) -> ModelVersion:
        self.versions.append(ModelVersion(spec, len(self.versions) + 1, "ana", 5.0))
        return self.versions[-1]

    def model_version(self, reference: ModelReference) -> ModelVersion:
        number = reference.version or next(x.after for x in self.changes[::-1] if x.alias == reference.alias)
        return next(x for x in self.versions if x.version == number)

    def promote(self, name: str, alias: str, change: AliasSpec) -> AliasChange:
        last = next((x.after for x in self.changes[::-1] if x.alias == alias), None)
        made = AliasChange(len(self.changes), name, alias, last, change.version, 60.0, "ana", change.why)
        self.changes.append(made)
        return made

    def model(self, name: str) -> RegisteredModel:
        aliases = {x.alias: x.after for x in self.changes if x.after}
        return RegisteredModel(name, "blue", len(self.versions), self.versions[-1], aliases)

    def models(self, **page: int) -> list[RegisteredModel]:
        return [self.model("chat")]

    def model_versions(self, name: str) -> list[ModelVersion]:
        return self.versions[::-1]

    def model_history(self, name: str, **which: Any) -> list[AliasChange]:
        return self.changes[::-1]


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry()
    monkeypatch.setattr(ApiClient, "find", lambda _: registry)
    return registry


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path / "m"


def run(*args: str) -> str:
    done = runner.invoke(app, list(args))
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_a_directory_is_registered_with_its_digest(registry: Registry, model: Path) -> None:
    out = run("model", "register", "chat", str(model), "--metric", "ppl=3.5", "--metric", "bits=-1", "--note", "x")
    (made,) = registry.versions
    assert made.spec.sha256 == digest_of_directory(str(model)).sha256
    assert (made.spec.location, made.spec.metrics, made.spec.note) == (str(model), {"ppl": 3.5, "bits": -1.0}, "x")
    assert "team" not in made.spec.model_fields_set  # the token's
    assert out.startswith("chat:1 is registered")
    for wrong in ("ppl", "=1", "ppl=x"):
        with pytest.raises(UsageError, match="NAME=NUMBER"):
            run("model", "register", "chat", str(model), "--metric", wrong)


def test_versions_are_shown_compared_and_verified(registry: Registry, model: Path) -> None:
    run("model", "register", "chat", str(model), "--metric", "ppl=3")
    run("model", "register", "chat", str(model), "--metric", "ppl=2")
    run("model", "promote", "chat:2", "--as", "challenger", "--why", "lower perplexity")
    assert "lower perplexity" in run("model", "history", "chat")
    assert "challenger=2" in run("model", "list")
    assert run("model", "show", "chat").splitlines()[1].split("\t")[:2] == ["2", "challenger"]
    assert "ppl=2" in run("model", "show", "chat@challenger")
    assert run("model", "diff", "chat:1", "chat:2").splitlines() == ["FIELD\tchat:1\tchat:2", "metrics.ppl\t3.0\t2.0"]
    assert "intact: 1 files" in run("model", "verify", "chat:1")
    (model / "config.json").write_text("{ }")
    with pytest.raises(DataError, match="are not those of chat:1"):
        run("model", "verify", "chat:1")
    assert json.loads(run("model", "history", "chat", "--json"))[0]["after"] == 2


def test_a_promotion_by_alias_names_the_version_of_that_alias(registry: Registry, model: Path) -> None:
    run("model", "register", "chat", str(model))
    run("model", "promote", "chat:1", "--as", "challenger")
    assert "chat@champion names version 1; before, no version" in run("model", "promote", "chat@challenger")
    assert "names no version; before, version 1" in run("model", "promote", "chat", "--as", "challenger", "--remove")
    with pytest.raises(UsageError, match="is no time"):
        run("model", "history", "chat", "--at", "tomorrow")
    assert len(run("model", "history", "chat", "--at", "2030-01-01").splitlines()) == 3


def test_a_registered_model_is_served_by_its_name() -> None:
    spec = serve_module._spec("registry:chat@champion", {}, {}, {})
    assert (spec.name, spec.model) == ("chat", "registry:chat@champion")
    assert serve_module._spec("registry:chat:3", {"name": "web"}, {}, {}).name == "web"
    assert serve_module._spec("registry:chat:3", {"pip": ["vllm==0.19"]}, {}, {}).pip == ("vllm==0.19",)


class Endpoints(ApiClient):
    """An API that answers from a list of revisions."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", "")
        spec = ServeSpec(name="web", model="/m", version="chat:1")
        self.stored = [EndpointRevision("web", n, "blue", "ana", 5.0, "", spec) for n in (2, 1)]
        self.asked: list[tuple[str, dict[str, object] | None]] = []
        self.previous = 1

    def revisions(self, name: str) -> list[EndpointRevision]:
        return self.stored

    def feedback(self, name: str) -> list[RevisionFeedback]:
        return [RevisionFeedback(2, 3, 1)]

    def rollouts(self, name: str, limit: int = 100) -> list[RolloutStatus]:
        return []

    def endpoint(self, name: str) -> EndpointStatus:
        spec = ServeSpec(name=name, model="/m")
        shown = Endpoint(spec, "ana", EndpointState.RUNNING, 0.0, 1)
        return EndpointStatus(shown, "", 1, 0.0, 0, revision=2, previous=self.previous)

    def _post(self, path: str, body: object = None, query: Any = None) -> Any:
        self.asked.append((path, query))
        raise NotFoundError("stop here.")


def test_a_rollback_names_the_revision_that_served_before(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Endpoints()
    monkeypatch.setattr(ApiClient, "find", lambda _: api)
    for to in ((), ("--to", "7")):
        with pytest.raises(NotFoundError, match="stop here"):
            run("serve", "web", "--rollback", *to)
    assert [query for _, query in api.asked] == [{"revision": 1}, {"revision": 7}]
    assert run("endpoint", "history", "web").splitlines()[1].startswith("2\t")
    assert "3 up, 1 down" in run("endpoint", "history", "web")
    api.previous = 0
    with pytest.raises(NotFoundError, match="no earlier revision"):
        run("serve", "web", "--rollback")
    for wrong in (("--rollback",), ("web", "--to", "3"), ("web", "--rollback", "--name", "x")):
        with pytest.raises(UsageError):
            run("serve", *wrong)


def test_a_lineage_is_shown(registry: Registry) -> None:
    lineage = Lineage(job="job-7", dataset="/data", dataset_sha256="d" * 64, code="raytide 1", config={"steps": 5})
    spec = ModelVersionSpec(name="chat", location="/m", sha256="a" * 64, lineage=lineage)
    registry.register_model(spec)
    shown = run("model", "show", "chat:1")
    for part in ("job-7", "/data", "d" * 64, "raytide 1", '{"steps": 5}'):
        assert part in shown
