"""Datasets over the API and the CLI: versions that never change, by team, with what was made of them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_tenancy import ANA, BOB, ROOT, client, clock  # noqa: F401
from typer.testing import CliRunner

from raytide.cli.app import app
from raytide.cli.jobs import datasets as commands
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import JobKind, JobSpec
from raytide.core.specs.model_version import Lineage, ModelVersionSpec
from raytide.core.state import Store

TOKENS = {"documents": 10, "tokens": 1000, "vocab_size": 512, "read": 12, "dropped": {"duplicate": 2}}


def body(digit: str = "a", **changes: object) -> dict[str, object]:
    return {"name": "web", "location": f"/data/{digit}", "sha256": digit * 64, **TOKENS, **changes}


def register(client: TestClient, digit: str = "a", headers: dict[str, str] = ANA, **changes: object) -> Any:  # noqa: F811
    return client.post("/v1/datasets", json=body(digit, **changes), headers=headers)


def test_a_dataset_is_registered_once_and_a_changed_one_is_a_new_version(client: TestClient) -> None:  # noqa: F811
    versions = [register(client, digit).json()["version"] for digit in "aba"]
    assert versions == [1, 2, 1]
    (listed,) = client.get("/v1/datasets", headers=ANA).json()
    assert (listed["name"], listed["versions"], listed["newest"]["version"]) == ("web", 2, 2)
    shown = client.get("/v1/datasets/web/versions", headers=ANA).json()
    assert [each["spec"]["location"] for each in shown] == ["/data/b", "/data/a"]
    assert client.get("/v1/datasets/web", headers=ANA).json()["version"] == 2
    assert client.get("/v1/datasets/web/versions/1", headers=ANA).json()["spec"]["sha256"] == "a" * 64


def test_teams_see_their_own(client: TestClient) -> None:  # noqa: F811
    assert register(client).status_code == 200
    assert client.get("/v1/datasets", headers=BOB).json() == []
    assert len(client.get("/v1/datasets", headers=ROOT).json()) == 1
    for path in ("", "/versions", "/versions/1", "/versions/1/uses"):
        assert client.get(f"/v1/datasets/web{path}", headers=BOB).status_code == 403
    assert register(client, "c", BOB).status_code == 409, "the name is of another team"


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"name": "a/b"}, 400), ({"sha256": "x"}, 400), ({"tokens": -1}, 400), ({"job": "job-99"}, 404), ({"x": 1}, 400)],
)
def test_what_makes_no_sense_is_refused(client: TestClient, changes: dict[str, object], status: int) -> None:  # noqa: F811
    assert register(client, **changes).status_code == status
    assert client.get("/v1/datasets/none", headers=ANA).status_code == 404


def test_the_lineage_names_jobs_and_models(client: TestClient, store: Store) -> None:  # noqa: F811
    gang = GangSpec(shapes=(Shape(resources={"CPU": 1.0}),))
    train = {"dataset": "/data/a", "out": "/out", "steps": 1}
    made = [
        store.submit_job(JobSpec(kind=kind, name="j", team="default", gang=gang, config=config), "ana", 1.0).id
        for kind, config in (
            (JobKind.DATA, {"inputs": ["/text"], "out": "/data/a"}),
            (JobKind.TRAIN, train),
            (JobKind.TRAIN, {**train, "dataset": "/data/b"}),
        )
    ]
    for digit in "ab":
        lineage = Lineage(dataset_sha256=digit * 64)
        model = ModelVersionSpec(name="m", location="/m", sha256=digit * 64, lineage=lineage)
        store.models.register(model, "ana", 1.0)
    version = register(client, job=made[0], config={"ignored": True}).json()
    assert version["spec"]["config"]["inputs"] == ["/text"]
    uses = client.get("/v1/datasets/web/versions/1/uses", headers=ANA).json()
    assert uses == {"jobs": [made[1]], "models": ["m:1"]}


def test_the_commands_show_what_the_api_knows(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def call(method: str, path: str, sent: object = None, query: dict[str, str] | None = None) -> object:
        return client.request(method, path, json=sent, params=query, headers=ANA).raise_for_status().json()

    monkeypatch.setattr(commands.ApiClient, "find", lambda cluster: SimpleNamespace(call=call))
    for digit in "ab":
        register(client, digit)
    run = CliRunner()
    assert "web" in run.invoke(app, ["data", "list"]).stdout
    card = run.invoke(app, ["data", "show", "web:1"]).stdout
    assert "10 of 12 read" in card
    assert "duplicate 2" in card
    changes = json.loads(run.invoke(app, ["data", "diff", "web:1", "web", "--json"]).stdout)
    assert {change["field"] for change in changes} == {"location", "sha256"}
