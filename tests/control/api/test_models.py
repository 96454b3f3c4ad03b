"""Registered models and revisions of endpoints over the API: who may see and change what, and what is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_tenancy import ANA, BOB, ROOT, client, clock  # noqa: F401

from raytide.control.job_tokens import token_of
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState
from raytide.core.specs.train import TrainSpec
from raytide.core.state import Changes, Store

SHA = "a" * 64


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("m1", "m2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def register(client: TestClient, location: Path | str, headers: dict[str, str] = ANA, **spec: object) -> Any:  # noqa: F811
    body = {"name": "chat", "location": str(location), "sha256": SHA, **spec}
    return client.post("/v1/models", json=body, headers=headers)


def promote(client: TestClient, version: int | None, headers: dict[str, str] = ANA, **change: object) -> Any:  # noqa: F811
    body = {"version": version, **change}
    return client.put("/v1/models/chat/aliases/champion", json=body, headers=headers)


def serve(client: TestClient, model: str, **spec: object) -> Any:  # noqa: F811
    return client.post("/v1/endpoints", json={"name": "web", "model": model, **spec})


def test_a_rule_looks_at_the_last_test_of_both_versions(
    client: TestClient,  # noqa: F811
    store: Store,
    directory: Path,
) -> None:
    for path in ("m1", "m2"):
        register(client, directory / path)
    promote(client, 1)
    assert "there is none" in promote(client, 2, rule={}).text
    specs = [ServeSpec(name="web", model=str(directory / f"m{n}"), version=f"chat:{n}") for n in (1, 2)]
    store.save_endpoint(specs[0], "ana", 1.0)
    store.rollouts.start(specs[1], "ab", {"ab": {}}, "ana", 2.0, "")
    assert "there is none" in promote(client, 2, rule={}).text, "it has begun, and nobody has looked"
    for winner, status in (("a", 409), ("", 200)):
        (rollout,) = store.load().rollouts
        look = {"test": {"winner": winner, "low": None, "p_value": 0.5}}
        store.commit(Changes(at_s=3.0, rollouts=(replace(rollout, progress=look),)))
        assert promote(client, 2, rule={}).status_code == status


class TestModels:
    def test_a_version_is_registered_found_and_promoted(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        made = register(client, directory / "m1", metrics={"ppl": 3.5}, note="first").json()
        assert (made["version"], made["user"], made["created_at_s"]) == (1, "ana", 1000.0)
        assert made["spec"]["metrics"] == {"ppl": 3.5}
        assert promote(client, 1, why="it is the first").json()["user"] == "ana"
        assert client.get("/v1/models/chat/versions/1").json() == made
        assert client.get("/v1/models/chat/versions/champion").json() == made
        assert client.get("/v1/models").json()[0]["aliases"] == {"champion": 1}
        assert client.get("/v1/models/chat").json()["newest"] == made
        (change,) = client.get("/v1/models/chat/history").json()
        assert (change["before"], change["after"], change["why"]) == (None, 1, "it is the first")
        assert register(client, directory / "m1", metrics={"ppl": 3.5}, note="first").json() == made

    def test_another_team_sees_and_changes_nothing(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        register(client, directory / "m1")
        for path in ("", "/versions", "/versions/1", "/history"):
            assert client.get(f"/v1/models/chat{path}", headers=BOB).status_code == 403
            assert client.get(f"/v1/models/chat{path}", headers=ROOT).status_code == 200
        assert client.get("/v1/models", headers=BOB).json() == []
        assert promote(client, 1, BOB).status_code == 403
        assert register(client, directory / "m2", BOB).status_code == 409
        assert register(client, directory / "m2", BOB, name="b", team="default").status_code == 403
        body = {"name": "web", "model": "registry:chat:1"}
        assert client.post("/v1/endpoints", json=body, headers=BOB).status_code == 403

    def test_a_rule_decides_by_the_figures_of_both_versions(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        rule = {"metrics": {"ppl": {"better": "lower", "gain": 0.5}}, "online": "ignored"}
        for path, ppl in (("m1", 3.5), ("m2", 3.2), ("m1", 2.9)):
            register(client, directory / path, metrics={"ppl": ppl})
        assert promote(client, 1, rule=rule).status_code == 200, "the first needs no improvement"
        refused = promote(client, 2, rule=rule)
        assert refused.status_code == 409
        assert "chat:2 does not become chat@champion: ppl: +0.3 over the champion's 3.5" in refused.text
        assert promote(client, 3, rule=rule, if_version=2).status_code == 409
        made = promote(client, 3, why="longer", rule=rule, if_version=1).json()
        assert made["after"] == 3
        assert promote(client, 3, why="longer", rule=rule, if_version=1).json() == made, "its response was lost"
        newest = client.get("/v1/models/chat/history").json()[0]
        assert (newest["before"], newest["after"]) == (1, 3)
        assert newest["why"] == "longer; ppl: +0.6 over the champion's 3.5"
        assert promote(client, 2, rule={"online": "always"}).status_code == 400

    def test_what_is_no_model_is_refused(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        assert "config.json" in register(client, directory / "missing", ROOT).json()["error"]["message"]
        assert register(client, "http://x/y").status_code == 400
        assert register(client, "s3://bucket/model").status_code == 200
        assert register(client, directory / "m1", sha256="x").status_code == 400
        assert register(client, directory / "m1", name="A/B").status_code == 400
        assert register(client, directory / "m1", team="nobody", headers=ROOT).status_code == 400

    @pytest.mark.parametrize("alias", ["1", "a b", "Champion", "x" * 70, "a:b"])
    def test_an_alias_is_a_word(self, client: TestClient, directory: Path, alias: str) -> None:  # noqa: F811
        register(client, directory / "m1")
        response = client.put(f"/v1/models/chat/aliases/{alias}", json={"version": 1})
        assert response.status_code == 400

    def test_the_lineage_of_a_job_is_that_of_its_record(
        self,
        client: TestClient,  # noqa: F811
        directory: Path,
        store: Store,
    ) -> None:
        (directory / "run").mkdir()
        (directory / "m1").rename(directory / "run" / "model")
        job = trained(store, str(directory / "run"))
        spec: dict[str, object] = {"lineage": {"job": job, "dataset": "/lie", "config": {"x": 1}}}
        made = register(client, directory / "run" / "model", **spec).json()
        assert made["spec"]["lineage"]["dataset"] == "/data"
        assert made["spec"]["lineage"]["config"]["steps"] == 5
        assert made["spec"]["lineage"]["code"].startswith("raytide")
        assert register(client, directory / "m2", **spec).status_code == 400
        assert register(client, directory / "run" / "model", BOB, **spec).status_code == 403
        assert register(client, directory / "run" / "model", lineage={"job": "job-99"}).status_code == 404

    def test_a_job_may_register_a_model_but_not_promote_it(
        self,
        client: TestClient,  # noqa: F811
        directory: Path,
        store: Store,
    ) -> None:
        spec = JobSpec(kind=JobKind.GANG, name="j", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))
        job = store.submit_job(spec, "ana", 1.0)
        headers = {"Authorization": f"Bearer {token_of(job.id, b'k' * 32)}"}
        assert register(client, directory / "m1", headers).json()["user"] == "ana"
        assert promote(client, 1, headers).status_code == 403


class TestServing:
    def test_an_alias_is_resolved_when_the_endpoint_is_given(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        register(client, directory / "m1")
        register(client, directory / "m2")
        promote(client, 1)
        spec = serve(client, "registry:chat@champion").json()["endpoint"]["spec"]
        assert (spec["model"], spec["version"]) == (str(directory / "m1"), "chat:1")
        promote(client, 2)
        assert client.get("/v1/endpoints/web").json()["endpoint"]["spec"] == spec
        spec = serve(client, "registry:chat@champion").json()["endpoint"]["spec"]
        assert (spec["model"], spec["version"]) == (str(directory / "m2"), "chat:2")
        assert serve(client, "registry:chat:1").json()["endpoint"]["spec"]["version"] == "chat:1"
        assert serve(client, str(directory / "m1")).json()["endpoint"]["spec"]["version"] == ""

    def test_a_version_that_is_named_beside_another_directory_is_refused(
        self,
        client: TestClient,  # noqa: F811
        directory: Path,
    ) -> None:
        register(client, directory / "m1")
        assert serve(client, str(directory / "m1"), version="chat:1").status_code == 200
        refused = serve(client, str(directory / "m2"), version="chat:1")
        assert (refused.status_code, "lies at" in refused.json()["error"]["message"]) == (400, True)

    @pytest.mark.parametrize("model", ["registry:chat", "registry:chat@", "registry:x y:1"])
    def test_a_malformed_reference_is_an_error(self, client: TestClient, model: str) -> None:  # noqa: F811
        assert serve(client, model).status_code == 400

    def test_an_unknown_reference_is_not_found(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        register(client, directory / "m1")
        for model in ("registry:chat:2", "registry:chat@champion", "registry:other:1"):
            assert serve(client, model).status_code == 404

    def test_a_rollback_restores_the_version_and_not_the_alias(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        register(client, directory / "m1")
        register(client, directory / "m2")
        for version in (1, 2):
            promote(client, version)
            serve(client, "registry:chat@champion")
        spec = client.post("/v1/endpoints/web/rollback", params={"revision": 1}).json()["endpoint"]["spec"]
        assert (spec["model"], spec["version"]) == (str(directory / "m1"), "chat:1")
        found = client.get("/v1/endpoints/web/revisions").json()
        assert [(x["number"], x["user"], x["spec"]["version"], x["why"]) for x in found] == [
            (3, "ana", "chat:1", "rollback to revision 1"),
            (2, "ana", "chat:2", ""),
            (1, "ana", "chat:1", ""),
        ]
        client.post("/v1/endpoints/web/rollback", params={"revision": 1})  # again: nothing changes
        assert len(client.get("/v1/endpoints/web/revisions").json()) == 3

    def test_a_rollback_needs_the_team_and_a_revision_that_exists(self, client: TestClient, directory: Path) -> None:  # noqa: F811
        serve(client, str(directory / "m1"))
        path = "/v1/endpoints/web/rollback"
        assert client.post(path, params={"revision": 1}, headers=BOB).status_code == 403
        assert client.get("/v1/endpoints/web/revisions", headers=BOB).status_code == 403
        assert client.post(path, params={"revision": 2}).status_code == 404
        assert client.post(path, params={"revision": 0}).status_code == 400
        assert client.post(path).status_code == 400


def trained(store: Store, out: str) -> str:
    """Returns the id of a training job that succeeded."""
    gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    config = TrainSpec(dataset="/data", out=out, steps=5).model_dump(mode="json")
    job = store.submit_job(JobSpec(kind=JobKind.TRAIN, name="t", gang=gang, config=config), "ana", 1.0)
    store.commit(Changes(2.0, jobs=(replace(job, state=JobState.SUCCEEDED, ended_at_s=2.0),)))
    return job.id
