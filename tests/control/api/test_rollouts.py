"""Rollouts over the API: who may begin, see and end one, and what an endpoint is meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.control.api.test_models import directory, serve  # noqa: F401
from tests.control.api.test_tenancy import ANA, BOB, ROOT, client, clock  # noqa: F401

from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.core.specs.rollout import RolloutState
from raytide.core.state import Changes, Store

pytestmark = pytest.mark.usefixtures("directory")


@pytest.fixture
def api(client: TestClient, directory: Path) -> TestClient:  # noqa: F811
    """An API with the endpoint `web`."""
    assert serve(client, str(directory / "m1"), price={"prompt": 2.0}).status_code == 200
    return client


def start(api: TestClient, folder: Path, headers: dict[str, str] = ANA, name: str = "web", **rollout: object) -> Any:
    spec = {"name": name, "model": str(folder / "m2"), "price": {"prompt": 3.0}}
    body = {"spec": spec, "rollout": rollout or {"canary": {}}, "why": "it is newer"}
    return api.post("/v1/rollouts", json=body, headers=headers)


def decide(store: Store, state: RolloutState) -> None:
    (rollout,) = store.load().rollouts
    store.commit(Changes(at_s=1001.0, rollouts=(replace(rollout, state=state, decided_at_s=1001.0),)))


def test_a_challenger_runs_beside_the_endpoint_until_it_serves_it(
    api: TestClient,
    directory: Path,  # noqa: F811
    store: Store,
) -> None:
    begun = start(api, directory).json()
    assert (begun["rollout"]["state"], begun["rollout"]["user"], begun["rollout"]["why"]) == (
        "starting",
        "ana",
        "it is newer",
    )
    assert (begun["champion"]["revision"], begun["challenger"]["revision"]) == (1, 2)
    shown = {each["endpoint"]["spec"]["name"]: each for each in api.get("/v1/endpoints").json()}
    assert {name: each["revision"] for name, each in shown.items()} == {"web": 1, "web~2": 0}
    decide(store, RolloutState.PROMOTED)
    web = api.get("/v1/endpoints/web").json()
    assert (web["revision"], web["previous"], web["endpoint"]["spec"]["model"]) == (2, 1, str(directory / "m2"))
    assert web["base_url"].endswith("/web/v1")
    (rollout,) = api.get("/v1/endpoints/web/rollouts").json()
    assert rollout["rollout"]["state"] == "promoted"
    assert api.delete("/v1/endpoints/web").json()["endpoint"]["state"] == "deleting"
    assert {e.name: e.state for e in store.load().endpoints}["web~2"] is EndpointState.DELETING


def test_the_name_of_a_promoted_challenger_deletes_and_shows_nothing(
    api: TestClient,
    directory: Path,  # noqa: F811
    store: Store,
) -> None:
    start(api, directory)
    decide(store, RolloutState.PROMOTED)
    refused = api.delete("/v1/endpoints/web~2")
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, "web~2 serves endpoint web now.")
    assert store.endpoint("web").state is EndpointState.DEPLOYING
    assert api.get("/v1/endpoints/web~2").status_code == 404


def test_a_challenger_is_deleted_by_its_own_name_and_then_unknown(
    api: TestClient,
    directory: Path,  # noqa: F811
    store: Store,
) -> None:
    start(api, directory)
    assert api.delete("/v1/endpoints/web~2").json()["endpoint"]["state"] == "deleting"
    deleted = replace(store.endpoint("web~2"), state=EndpointState.DELETED)
    store.commit(Changes(at_s=1001.0, endpoints=(deleted,)))
    answer = api.get("/v1/endpoints/web~2")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert [each["endpoint"]["spec"]["name"] for each in api.get("/v1/endpoints").json()] == ["web"]


def test_ended_challengers_are_not_read_but_their_costs_stay(
    api: TestClient,
    directory: Path,  # noqa: F811
    store: Store,
) -> None:
    for number in (2, 3):
        start(api, directory)
        decide(store, RolloutState.ROLLED_BACK)
        (rollout,) = store.load().rollouts
        deleted = replace(store.endpoint(f"web~{number}"), state=EndpointState.DELETED)
        cost = Entry(f"node-{number}", 0, 10, EntryKind.ENDPOINT, deleted.name, "default", 100, 100)
        ended = replace(rollout, ended_at_s=1002.0)
        store.commit(Changes(at_s=1002.0, endpoints=(deleted,), rollouts=(ended,), entries=(cost,)))
    assert [each.name for each in store.endpoints(ended=True)] == ["web"]
    assert api.get("/v1/endpoints/web").json()["cost_micro_usd"] == 200
    rows = {row["key"]: row["amount_micro_usd"] for row in api.get("/v1/cost/model").json()["rows"]}
    assert rows == {str(directory / "m2"): 200}


def test_a_deleted_endpoint_that_a_challenger_served_is_still_shown(
    api: TestClient,
    directory: Path,  # noqa: F811
    store: Store,
) -> None:
    start(api, directory)
    decide(store, RolloutState.PROMOTED)
    deleted = replace(store.endpoint("web"), state=EndpointState.DELETED)
    store.commit(Changes(at_s=1002.0, endpoints=(deleted,)))
    assert api.get("/v1/endpoints/web").json()["endpoint"]["state"] == "deleted"


def test_gateways_bill_the_price_of_what_serves(
    api: TestClient,
    directory: Path,  # noqa: F811
    store: Store,
) -> None:
    from raytide.control.api.services.submission_rate import SubmissionRate
    from raytide.control.api.services.tenancy import TenancyService
    from raytide.core.clock import VirtualClock

    class NoTeams:
        def specs(self) -> dict[str, Any]:
            return {}

    service = TenancyService(store, VirtualClock(1000.0), NoTeams(), SubmissionRate())  # type: ignore[arg-type]
    start(api, directory)
    assert service.key_table(-1).prices["web"].prompt == 2.0
    decide(store, RolloutState.PROMOTED)
    assert service.key_table(-1).prices["web"].prompt == 3.0


def test_its_end_is_asked_for(api: TestClient, directory: Path) -> None:  # noqa: F811
    assert api.post("/v1/endpoints/web/rollout/stop", headers=ANA).status_code == 404
    start(api, directory)
    asked = api.post("/v1/endpoints/web/rollout/promote", params={"why": "sure"}, headers=ANA).json()["rollout"]
    assert (asked["asked"], asked["asked_by"], asked["asked_why"]) == ("promote", "ana", "sure")
    assert api.post("/v1/endpoints/web/rollout/pause", headers=ANA).status_code == 400
    actions = [each["action"] for each in api.get("/v1/audit", params={"object": "web"}, headers=ROOT).json()]
    assert actions == ["rollout.promote", "rollout.start", "endpoint.save"]


@pytest.mark.parametrize(
    "rollout",
    [{"canary": {"steps": []}}, {"canary": {}, "shadow": {}}, {"shadow": {"percent": 0}}, {"ab": {"percent": 100}}],
)
def test_malformed_plans_are_refused(api: TestClient, directory: Path, rollout: dict[str, object]) -> None:  # noqa: F811
    assert start(api, directory, **rollout).status_code == 400


def test_other_teams_names_with_a_tilde_and_second_rollouts_are_refused(
    api: TestClient,
    directory: Path,  # noqa: F811
) -> None:
    assert start(api, directory, BOB).status_code in (403, 409)
    assert start(api, directory, name="other").status_code == 404
    assert serve(api, str(directory / "m1"), name="web~7").status_code == 400
    assert start(api, directory).status_code == 200
    assert start(api, directory, canary={"steps": [{"percent": 50}]}).status_code == 409
    assert serve(api, str(directory / "m2")).status_code == 409
    for path in ("rollouts", "feedback"):
        assert api.get(f"/v1/endpoints/web/{path}", headers=BOB).status_code == 403
    assert api.post("/v1/endpoints/web/rollout/stop", headers=BOB).status_code == 403
    assert api.post("/v1/gateway/rollouts", json={"gateway": "g"}, headers=ANA).status_code == 403
