"""Limits and costs over the API: who may see and set what, and what a job waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.control.conftest import NoMachines
from tests.queue.cluster import Cluster, gpus, spec, team

from raytide.control.accounting.team_usage import limits, recent_gpu_s, recent_usage, team_usage, with_team_usage
from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.control.views import Live, Waiting, to_json
from raytide.core.clock import VirtualClock
from raytide.core.objects.cluster_config import ClusterConfig, load_cluster
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.job import JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share, Spent
from raytide.core.objects.snapshot import Snapshot
from raytide.core.objects.team import HALF_LIFE_S, Budget, TeamSpec
from raytide.core.state import Changes, Store
from raytide.core.state.records import StoredTeam

LOCAL = Path(__file__).parents[3] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml"
NOW_S = 1_700_000_000.0
US = 1_000_000


@pytest.fixture
def client(tmp_path: Path, store: Store) -> Iterator[TestClient]:
    tokens = {
        "root": {"user": "root", "team": "*"},
        "ana": {"user": "ana", "team": "default"},
        "bob": {"user": "bob", "team": "red"},
    }
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    desk = ApiService(
        store=store,
        config=configured(red=TeamSpec(quota={"CPU": 2.0})),
        bill=NoMachines(),
        drivers=None,  # type: ignore[arg-type]
        clock=VirtualClock(NOW_S),
        live=tmp_path / "live.json",
        serve_url="http://127.0.9.1:8000",
        ray_url="",
        ray_environment={},
    )
    with TestClient(create_app(desk, Tokens(tmp_path / "tokens.json"))) as client:
        yield client


def configured(**teams: TeamSpec) -> ClusterConfig:
    config = load_cluster(LOCAL)
    settings = config.settings.model_copy(update={"teams": {**config.settings.teams, **teams}})
    return config.model_copy(update={"settings": settings})


def as_(who: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {who}"}


def book(store: Store, subject: str, team: str, amount: int, kind: EntryKind = EntryKind.JOB, cause: str = "") -> None:
    from_us = round(NOW_S * US) - 7200 * US + len(store.books.entries())
    entry = Entry("node-1", from_us, from_us + 60 * US, kind, subject, team, 1, amount, cause=cause)
    store.commit(Changes(NOW_S, entries=(entry,)))


def test_costs_are_of_the_callers_team_and_sum_to_all_for_the_one_who_sees_all(
    client: TestClient, store: Store
) -> None:
    book(store, "job-1", "default", 100)
    book(store, "chat", "red", 30, EntryKind.ENDPOINT)
    book(store, "", "", 5, EntryKind.IDLE)
    shares = (Share(EntryKind.JOB, "job-1", "default", 0.5), Share(EntryKind.IDLE, "", "", 0.5))
    now_us = round(NOW_S * US)
    store.commit(Changes(NOW_S, intervals=(OpenInterval("node-1", 7200, now_us - US, now_us - US, shares),)))
    for by in ("team", "project", "job", "model", "node", "day"):
        assert client.get(f"/v1/cost/{by}", headers=as_("root")).json()["total_micro_usd"] == 135 + 2, by
        assert client.get(f"/v1/cost/{by}", headers=as_("bob")).json()["total_micro_usd"] == 30, by
    table = client.get("/v1/cost/team", headers=as_("ana")).json()
    assert [(row["key"], row["amount_micro_usd"], row["micro_usd_h"]) for row in table["rows"]] == [
        ("default", 101, 3600)
    ]
    since = {"since_s": NOW_S - 3600}
    assert client.get("/v1/cost/team", params=since, headers=as_("root")).json()["total_micro_usd"] == 2
    assert [line["team"] for line in client.get("/v1/cost", headers=as_("bob")).json()["lines"]] == ["red"]
    book(store, "job-1", "default", 40, EntryKind.WASTE, "job-7")
    (row,) = client.get("/v1/cost/job", headers=as_("ana")).json()["rows"]
    assert (row["amount_micro_usd"], row["lost_micro_usd"], row["lost_to"]) == (141, 40, ["job-7"])
    assert client.get("/v1/status", headers=as_("bob")).json()["cost_micro_usd"] == 30
    assert client.get("/v1/cost/phase", headers=as_("root")).status_code == 400


def test_endpoints_are_seen_by_their_team_alone(client: TestClient, store: Store) -> None:
    store.save_endpoint(ServeSpec(name="chat", model="/m", team="red"), "bob", NOW_S)
    assert [e["endpoint"]["spec"]["name"] for e in client.get("/v1/endpoints", headers=as_("bob")).json()] == ["chat"]
    assert client.get("/v1/endpoints", headers=as_("ana")).json() == []
    assert client.get("/v1/endpoints/chat", headers=as_("ana")).status_code == 403
    assert client.delete("/v1/endpoints/chat", headers=as_("ana")).status_code == 403


def test_nobody_touches_another_teams_job(client: TestClient, store: Store) -> None:
    body = {"kind": "gang", "name": "mine", "team": "red", "gang": {"shapes": [{"resources": {"CPU": 1}}]}}
    assert client.post("/v1/jobs", json=body, headers=as_("ana")).status_code == 403
    made = client.post("/v1/jobs", json=body, headers=as_("bob")).json()["job"]["id"]
    for method, path in (
        ("GET", ""),
        ("GET", "/why"),
        ("GET", "/logs"),
        ("GET", "/lease"),
        ("POST", "/stop"),
        ("POST", "/retry"),
        ("PUT", "/budget?usd=1"),
    ):
        answer = client.request(method, f"/v1/jobs/{made}{path}", headers=as_("ana"))
        assert answer.status_code == 403, path
    for path in ("report", "release"):
        assert client.post(f"/v1/jobs/{made}/{path}", json={}, headers=as_("ana")).status_code == 403
    assert client.get("/v1/jobs", headers=as_("ana")).json() == []


def test_limits_are_set_by_whoever_sees_all_and_hold_at_once(client: TestClient, store: Store) -> None:
    change = {"quota": {"GPU": 4}, "budget": {"hard_usd": 50}}
    assert client.patch("/v1/teams/red", json=change, headers=as_("bob")).status_code == 403
    assert client.patch("/v1/teams/red", json=change, headers=as_("root")).json()["quota"] == {"CPU": 2, "GPU": 4}
    assert client.patch("/v1/teams/red", json={"weight": 2}, headers=as_("root")).json()["budget"]["hard_usd"] == 50
    assert client.patch("/v1/teams/nobody", json=change, headers=as_("root")).status_code == 400
    assert client.patch("/v1/teams/red", json={"parent": "red"}, headers=as_("root")).status_code == 400
    for odd in ({"quota": {"GPU": -1}}, {"quota": {"H1OO": 8}}, {"lend": {"gpu": 8}}):
        assert client.patch("/v1/teams/red", json=odd, headers=as_("root")).status_code == 400, odd
    (shown,) = client.get("/v1/teams", headers=as_("bob")).json()
    assert (shown["name"], shown["given"]) == ("red", ["budget", "quota", "weight"])
    snapshot = with_team_usage(
        Snapshot(NOW_S, ()), configured(red=TeamSpec()), store.load().teams, Spent(teams_month={"red": 9})
    )
    red = next(team for team in snapshot.teams if team.name == "red")
    assert (red.spec.quota, red.spec.weight, red.spent_micro_usd) == ({"GPU": 4.0}, 2.0, 9)


def test_the_file_holds_for_all_that_was_not_set_and_again_after_a_reset(client: TestClient, store: Store) -> None:
    client.patch("/v1/teams/red", json={"quota": {"GPU": 4}, "budget": {"hard_usd": 50}}, headers=as_("root"))
    edited = configured(red=TeamSpec(quota={"CPU": 7.0, "GPU": 1.0}, weight=3.0, budget=Budget(soft_usd=60.0)))
    red = limits(edited, store.teams())["red"]
    assert (red.quota, red.weight) == ({"CPU": 7.0, "GPU": 4.0}, 3.0)
    assert (red.budget.soft_usd, red.budget.hard_usd) == (60.0, 50.0), "a later edit of the file fails nothing"
    back = client.patch("/v1/teams/red", json={"quota": None}, headers=as_("root")).json()
    assert (back["quota"], back["budget"]["hard_usd"]) == ({"CPU": 2.0}, 50.0)
    assert limits(edited, store.teams())["red"].quota == {"CPU": 7.0, "GPU": 1.0}


def test_limits_stored_under_another_tree_close_no_circle() -> None:
    stored = [StoredTeam(name, {"parent": above, "quota": {"GPU": 4.0}}) for name, above in (("b", "a"), ("c", "d"))]
    now = configured(b=TeamSpec(), a=TeamSpec(parent="b", quota={"GPU": 2.0}))
    c = Cluster(teams=with_team_usage(Snapshot(NOW_S, ()), now, stored, Spent()).teams)
    assert [(team.name, team.spec.parent) for team in c.teams] == [("a", "b"), ("b", ""), ("default", "")]
    c.submit(gpus(1), team="a")
    c.step()
    assert team_usage(c.snapshot)["b"].own == {"GPU": 6.0}


@pytest.mark.parametrize("usd", ["inf", "nan"])
def test_budgets_are_finite_and_can_be_taken_away(client: TestClient, usd: str) -> None:
    body = f'{{"budget": {{"hard_usd": {usd.replace("inf", "Infinity").replace("nan", "NaN")}}}}}'
    assert client.patch("/v1/teams/red", content=body, headers=as_("root")).status_code == 400
    gang = {"kind": "gang", "name": "x", "budget_usd": 3, "gang": {"shapes": [{"resources": {"CPU": 1}}]}}
    path = f"/v1/jobs/{client.post('/v1/jobs', json=gang, headers=as_('ana')).json()['job']['id']}/budget"
    assert client.put(path, params={"usd": usd}, headers=as_("ana")).status_code == 400
    assert client.put(path, headers=as_("ana")).json()["job"]["spec"]["budget_usd"] is None


def test_why_says_what_the_last_decision_said(client: TestClient, store: Store, tmp_path: Path) -> None:
    made = store.submit_job(spec(gpus(1), kind="gang", team="red"), "bob", NOW_S)
    waits = Waiting("quota", "team red has no more.", "Raise it.", 90.0)
    live = Live(NOW_S, waiting={made.id: waits}, queue=("job-9", made.id))
    (tmp_path / "live.json").write_text(json.dumps(to_json(live)))
    assert client.get(f"/v1/jobs/{made.id}/why", headers=as_("bob")).json() == {
        "job": made.id,
        "state": "queued",
        "position": 2,
        "constraint": "quota",
        "reason": "team red has no more.",
        "remedy": "Raise it.",
        "wait_s": 90.0,
        "stance": None,
        "data": "",
    }


def test_a_job_that_is_over_is_submitted_again_and_one_that_is_not_is_refused(client: TestClient, store: Store) -> None:
    body = {"kind": "gang", "name": "mine", "team": "red", "gang": {"shapes": [{"resources": {"CPU": 1}}]}}
    made = client.post("/v1/jobs", json=body, headers=as_("bob")).json()["job"]["id"]
    assert client.post(f"/v1/jobs/{made}/retry", headers=as_("bob")).status_code == 409
    store.commit(Changes(NOW_S, jobs=(replace(store.job(made), state=JobState.FAILED, ended_at_s=NOW_S),)))
    again = client.post(f"/v1/jobs/{made}/retry", headers=as_("bob")).json()["job"]
    assert again["id"] != made
    assert again["spec"] == to_json(store.job(made).spec)
    changed = client.put(f"/v1/jobs/{again['id']}/budget", params={"usd": 7}, headers=as_("bob")).json()
    assert changed["job"]["spec"]["budget_usd"] == 7
    softly = {"usd": 5, "soft": True}
    changed = client.put(f"/v1/jobs/{again['id']}/budget", params=softly, headers=as_("bob")).json()
    assert (changed["job"]["spec"]["soft_budget_usd"], changed["job"]["spec"]["budget_usd"]) == (5, 7)


def test_a_jobs_budget_by_the_month_is_shown_and_set_and_its_two_budgets_are_for_one_time(
    client: TestClient, store: Store
) -> None:
    body = {"kind": "gang", "name": "mine", "team": "red", "gang": {"shapes": [{"resources": {"CPU": 1}}]}}
    month = {**body, "budget_usd": 500, "budget_per": "month"}
    made = client.post("/v1/jobs", json=month, headers=as_("bob")).json()["job"]["id"]
    long_ago = round(NOW_S * US) - 40 * 86400 * US
    early = Entry("node-1", long_ago, long_ago + US, EntryKind.JOB, made, "red", 1, 7_000_000)
    store.commit(Changes(NOW_S, entries=(early,)))
    book(store, made, "red", 3_000_000)
    view = client.get(f"/v1/jobs/{made}", headers=as_("bob")).json()
    assert (view["cost_micro_usd"], view["month_micro_usd"]) == (10_000_000, 3_000_000)

    def put(**params: object) -> tuple[int, dict[str, Any]]:
        answer = client.put(f"/v1/jobs/{made}/budget", params=params, headers=as_("bob"))
        return answer.status_code, answer.json()

    code, refused = put(usd=5, soft=True)
    assert (code, "$500, is by the month" in refused["error"]["message"]) == (400, True)
    assert put(usd=5, soft=True, per="month")[0] == 200
    code, changed = put()
    assert [changed["job"]["spec"][name] for name in ("budget_usd", "soft_budget_usd", "budget_per")] == [
        None,
        5,
        "month",
    ]
    assert put(soft=True)[1]["job"]["spec"]["budget_per"] == "job"
    code, changed = put(usd=9)
    assert (changed["job"]["spec"]["budget_per"], changed["month_micro_usd"]) == ("job", None)
    assert put(usd=9, per="week")[0] == 400
    store.commit(Changes(NOW_S, jobs=(replace(store.job(made), state=JobState.FAILED, ended_at_s=NOW_S),)))
    assert put(usd=11)[0] == 409
    for odd in ({"budget_per": "month"}, {"budget_per": "week", "budget_usd": 5}):
        assert client.post("/v1/jobs", json={**body, **odd}, headers=as_("bob")).status_code == 400, odd


def test_a_class_that_there_is_not_is_refused(client: TestClient) -> None:
    body = {"kind": "gang", "name": "x", "priority": "urgent", "gang": {"shapes": [{"resources": {"CPU": 1}}]}}
    answer = client.post("/v1/jobs", json=body, headers=as_("ana"))
    assert answer.status_code == 400
    assert "high, normal, low" in answer.json()["error"]["hint"]


def test_recent_use_fades_by_half_and_is_written_down_now_and_then() -> None:
    stored = StoredTeam("blue", {}, 1000.0, NOW_S)
    assert recent_gpu_s(stored, NOW_S + HALF_LIFE_S) == 500.0
    c = Cluster()
    c.submit(gpus(2, members=2))
    c.step()
    assert recent_usage([stored], c.jobs.values(), NOW_S + 5) == ()
    (now,) = recent_usage([stored], c.jobs.values(), NOW_S + 40)
    assert now.recent_gpu_s == pytest.approx(1000.0 + 4 * 40, rel=1e-3)
    assert now.recent_at_s == NOW_S + 40


def test_what_a_team_holds_is_told() -> None:
    c = Cluster(teams=(team("blue", quota={"GPU": 4}, spent_usd=3.0), team("red")))
    c.submit(gpus(8))
    c.step()
    blue = team_usage(c.snapshot)["blue"]
    assert (blue.own, blue.used, blue.available) == ({"GPU": 4.0}, {"GPU": 8.0}, {"GPU": 8.0})
    assert blue.committed_micro_usd == 3_000_000 + 80_000_000
