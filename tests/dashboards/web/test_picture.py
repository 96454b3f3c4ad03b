"""The picture of the page, its tide and its ledger over a real store: equal to what the API says elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from raytide.control.api.services.service import ApiService
from raytide.control.views import Live, Waiting, to_json
from raytide.core.clock import VirtualClock
from raytide.core.io.atomic_file import write_json
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad, Traffic
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState
from raytide.core.objects.job import JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import CapacityType, Node, NodeState, Signal
from raytide.core.state import Changes, Store
from raytide.dashboards.web import picture

GANG = {"shapes": [{"members": 2, "resources": {"GPU": 4, "CPU": 0}}]}
MINUTE_US, PRICE = 60_000_000, 2_000_000
NOW_US = 100_000 * 1_000_000


def job_spec(**changes: object) -> JobSpec:
    config = {"name": "tiny", "dataset": "/data", "out": "/none", "steps": 10}
    return JobSpec.parse({"kind": "train", "name": "tiny", "gang": GANG, "config": config, **changes}, where="job")


@pytest.fixture
def busy(store: Store, tmp_path: Path) -> None:
    """One GPU node that job-1 holds in part, job-2 in the queue, and an endpoint with one replica."""
    for team in ("default", "research"):
        store.submit_job(job_spec(team=team), "ana", 99_000.0)
    store.save_endpoint(ServeSpec(name="chat", model="/models/tiny", team="research"), "bob", 99_000.0)
    job = store.job("job-1")
    lease = Lease(
        "lease-1", job.id, job.spec.gang.shapes[0], LeaseState.ACTIVE, (Member(0, MemberState.READY, "node-1"),)
    )
    node = Node(
        "node-1", "gpu8", "local-a", CapacityType.ON_DEMAND, PRICE, NodeState.READY, 99_000.0, 99_010.0, 99_020.0
    )
    held = (Share(EntryKind.IDLE, "", "", 0.5), Share(EntryKind.JOB, "job-1", "default", 0.5))
    past = [
        Entry("node-1", at, at + MINUTE_US, kind, subject, team, PRICE, PRICE // 120)
        for at in range(NOW_US - 20 * MINUTE_US, NOW_US - MINUTE_US, MINUTE_US)
        for kind, subject, team in ((EntryKind.IDLE, "", ""), (EntryKind.JOB, "job-1", "default"))
    ]
    store.commit(
        Changes(
            at_s=99_500.0,
            jobs=(replaced(job, state=JobState.RUNNING),),
            leases=(lease,),
            nodes=(node,),
            entries=tuple(past),
            intervals=(OpenInterval("node-1", PRICE, NOW_US - 21 * MINUTE_US, NOW_US - MINUTE_US, held),),
        )
    )
    store.report("job-1", {"step": 4, "steps": 10, "loss": 2.5}, 99_990.0)
    load = EndpointLoad(
        99_999.0, 2.0, 1, ("ray-1",), (ReplicaLoad("r1", 99_999.0, 1.0, 1.0, 0.25),), Traffic(1.5, 10.0, 33.0, 0.2)
    )
    live = Live(
        at_s=99_999.0,
        queue=("job-2",),
        waiting={"job-2": Waiting("quota", "team research has 0 of 4 GPU left.", "Raise it.", 30.0)},
        loads={"chat": load},
        use={"node-1": {"gpu": Signal(0.5, 99_999.0)}},
    )
    write_json(tmp_path / "live.json", to_json(live))


def replaced(value: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(value, **changes)


@pytest.mark.usefixtures("busy")
class TestPicture:
    def test_rows_say_what_the_api_says(self, service: ApiService, client: TestClient) -> None:
        seen = service.pictures.take().seen_by("*")
        for view in client.get("/v1/jobs").json():
            row = seen["jobs"][view["job"]["id"]]
            assert row["state"] == view["job"]["state"]
            assert row["progress"] == view["job"]["progress"]
            assert (row["position"], row["cost_micro_usd"]) == (view["position"], view["cost_micro_usd"])
            assert row["price_micro_usd_h"] == view["price_micro_usd_h"]
            assert row["waiting"] == (view["waiting"] or {"reason": ""})["reason"]
        status = client.get("/v1/status").json()
        for name in ("price_micro_usd_h", "cost_micro_usd", "jobs"):
            assert seen["status"][name] == status[name]
        assert [row["id"] for row in seen["nodes"].values()] == [node["id"] for node in status["nodes"]]
        (endpoint,) = client.get("/v1/endpoints").json()
        row = seen["endpoints"]["chat"]
        assert (row["ready"], row["ongoing"]) == (endpoint["ready_replicas"], endpoint["ongoing"]) == (1, 2.0)
        assert (row["rps"], row["tps"], row["ttft_s"], row["kv_use"]) == (1.5, 33.0, 0.2, 0.25)

    def test_jobs_that_run_are_shown_however_many_others_were_submitted_since(
        self, service: ApiService, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        later = [store.submit_job(job_spec(), "ana", 99_100.0) for _ in range(4)]
        ended = tuple(replaced(job, state=JobState.SUCCEEDED, ended_at_s=99_900.0) for job in later)
        store.commit(Changes(at_s=99_900.0, jobs=ended))
        monkeypatch.setattr(picture, "MOST_JOBS", 3)
        assert list(service.pictures.take().jobs) == ["job-6", "job-2", "job-1"]

    def test_a_node_shows_who_holds_it(self, service: ApiService) -> None:
        row = service.pictures.take().nodes["node-1"]
        assert {(share["use"], share["subject"], share["weight"]) for share in row["held"]} == {
            ("idle", "", 0.5),
            ("training", "job-1", 0.5),
        }
        assert row["use"] == {"gpu": 0.5}

    def test_shares_of_different_resources_are_one_node_together(self, service: ApiService, store: Store) -> None:
        held = (Share(EntryKind.ENDPOINT, "chat", "research", 1.0), Share(EntryKind.JOB, "job-1", "default", 0.6))
        opened = OpenInterval("node-1", PRICE, NOW_US - 21 * MINUTE_US, NOW_US - MINUTE_US, held)
        store.commit(Changes(at_s=99_600.0, intervals=(opened,)))
        row = service.pictures.take().nodes["node-1"]
        assert {share["use"]: share["weight"] for share in row["held"]} == {"serving": 0.625, "training": 0.375}

    def test_specs_are_read_once_and_leases_when_they_change(self, service: ApiService, store: Store) -> None:
        service.pictures.take()
        lease = store.lease_of("job-1")
        assert lease is not None
        store.jobs_of = lambda ids: (_ for _ in ()).throw(AssertionError(ids))  # type: ignore[method-assign]
        assert service.pictures.take().jobs["job-1"]["ready"] == 1
        del store.jobs_of  # type: ignore[method-assign]
        gone = replaced(lease, members=(replaced(lease.members[0], state=MemberState.WAITING, node_id=""),))
        store.commit(Changes(at_s=99_600.0, leases=(gone,)))
        assert service.pictures.take().jobs["job-1"]["ready"] == 0

    def test_costs_are_looked_at_now_and_then(self, service: ApiService, clock: VirtualClock) -> None:
        first = service.pictures.take().jobs["job-1"]
        clock.sleep(5.0)
        assert service.pictures.take().jobs["job-1"] == first
        clock.sleep(6.0)
        assert service.pictures.take().jobs["job-1"]["cost_micro_usd"] > first["cost_micro_usd"]


@pytest.mark.usefixtures("busy")
class TestTide:
    def test_it_adds_up_to_the_costs(self, client: TestClient) -> None:
        tide = client.get("/v1/tide", params={"since_s": 7200, "step_s": 600}).json()
        total = sum(sum(series["micro_usd"]) for series in tide["series"])
        assert total == client.get("/v1/status").json()["cost_micro_usd"]
        training = next(series for series in tide["series"] if series["use"] == "training")
        assert sum(training["gpu_h"]) == pytest.approx(8 * 0.5 * 20 / 60, rel=1e-3)
        assert len(training["gpu_h"]) == 12
        assert tide["from_s"] % tide["step_s"] == 0

    def test_steps_that_are_over_are_not_read_again(
        self, client: TestClient, store: Store, clock: VirtualClock
    ) -> None:
        before = client.get("/v1/tide", params={"since_s": 7200, "step_s": 600}).json()
        asked: list[int] = []
        read = store.overview.node_hours
        store.overview.node_hours = lambda *range: (asked.append(range[0]), read(*range))[1]  # type: ignore[method-assign]
        clock.sleep(60.0)
        after = client.get("/v1/tide", params={"since_s": 7200, "step_s": 600}).json()
        (begin_us,) = asked
        assert begin_us >= to_us(after["from_s"]) + 8 * 600 * 1_000_000
        assert sum(before["series"][0]["gpu_h"][:8]) == sum(after["series"][0]["gpu_h"][:8])

    def test_what_is_booked_late_counts_where_it_began(
        self, client: TestClient, store: Store, clock: VirtualClock
    ) -> None:
        asked = {"since_s": 7200, "step_s": 600}
        client.get("/v1/tide", params=asked)
        clock.sleep(1800.0)  # nothing is booked meanwhile
        client.get("/v1/tide", params=asked)
        begin_us, now_us = NOW_US - MINUTE_US, NOW_US + 30 * MINUTE_US
        held = (Share(EntryKind.IDLE, "", "", 0.5), Share(EntryKind.JOB, "job-1", "default", 0.5))
        late = tuple(
            Entry("node-1", begin_us, now_us, s.kind, s.subject, s.team, PRICE, 31 * PRICE // 120) for s in held
        )
        after = OpenInterval("node-1", PRICE, NOW_US - 21 * MINUTE_US, now_us, held)
        store.commit(Changes(at_s=now_us / 1e6, entries=late, intervals=(after,)))
        clock.sleep(20.0)
        tide = client.get("/v1/tide", params=asked).json()
        total = sum(sum(series["micro_usd"]) for series in tide["series"])
        assert total == client.get("/v1/status").json()["cost_micro_usd"]

    def test_a_team_sees_its_own_share(self, client: TestClient) -> None:
        own = client.get("/v1/tide", headers={"Authorization": "Bearer secret"}).json()
        assert {series["use"] for series in own["series"]} == {"training"}
        other = client.get("/v1/tide", headers={"Authorization": "Bearer other"}).json()
        assert other["series"] == []


@pytest.mark.usefixtures("busy")
class TestLedger:
    def test_the_entries_of_a_job_are_paged_newest_first(self, client: TestClient) -> None:
        page = client.get("/v1/ledger", params={"subject": "job-1", "limit": 10}).json()
        assert len(page) == 10
        rest = client.get("/v1/ledger", params={"subject": "job-1", "until_s": page[-1]["from_us"] / 1e6}).json()
        times = [entry["from_us"] for entry in page + rest]
        assert times == sorted(set(times), reverse=True)
        assert len(times) == 19

    def test_a_team_sees_its_own_entries(self, client: TestClient) -> None:
        assert {e["team"] for e in client.get("/v1/ledger", headers={"Authorization": "Bearer secret"}).json()} == {
            "default"
        }
        assert client.get("/v1/ledger", headers={"Authorization": "Bearer other"}).json() == []

    def test_the_fleet_of_an_earlier_time_comes_back(self, client: TestClient) -> None:
        (node,) = client.get("/v1/fleet", params={"at_s": 100_000 - 600}).json()["nodes"]
        assert {share["use"]: share["weight"] for share in node["held"]} == pytest.approx(
            {"idle": 0.5, "training": 0.5}, abs=1e-3
        )
        assert client.get("/v1/fleet", params={"at_s": 98_000}).json()["nodes"] == []


@pytest.mark.usefixtures("busy")
class TestCurves:
    def test_a_run_that_logged_nothing_has_no_steps(self, client: TestClient) -> None:
        assert client.get("/v1/jobs/job-1/metrics").json()["steps"] == []

    def test_another_team_sees_none(self, client: TestClient) -> None:
        assert client.get("/v1/jobs/job-1/metrics", headers={"Authorization": "Bearer other"}).status_code == 403

    def test_only_trainings_have_curves(self, client: TestClient, store: Store) -> None:
        store.submit_job(JobSpec.parse({"kind": "gang", "name": "mine", "gang": GANG}, where="job"), "ana", 99_000.0)
        assert client.get("/v1/jobs/job-3/metrics").json()["error"]["code"] == "usage"


def to_us(seconds: float) -> int:
    return round(seconds * 1e6)
