"""The API over a real store: who may ask, what is refused at the door, what is shown."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from starlette.types import Message
from tests.control.conftest import NoMachines

from raytide.control.api.auth import JobTokens, Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.control.job_tokens import token_of
from raytide.control.views import Live, to_json
from raytide.core.clock import VirtualClock
from raytide.core.io.atomic_file import write_json
from raytide.core.objects.cluster_config import RaytideSection, load_cluster
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad, Traffic
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState
from raytide.core.objects.job import JobSpec, JobState
from raytide.core.objects.ledger_entry import Entry, EntryKind
from raytide.core.objects.node import CapacityType, Signal
from raytide.core.objects.plan import Plan, Wait
from raytide.core.objects.snapshot import MarketConstraint
from raytide.core.objects.team import TeamSpec
from raytide.core.state import Changes, Store
from raytide.core.telemetry.targets import Target, announce

LOCAL = Path(__file__).parents[3] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml"
GANG = {"kind": "gang", "name": "mine", "gang": {"shapes": [{"members": 2, "resources": {"CPU": 1}}]}}
SCRIPT = {
    "kind": "script",
    "name": "mine",
    "gang": {"shapes": [{"members": 1, "resources": {"CPU": 1}}]},
    "config": {"command": ["true"]},
}


class Echo:
    """Drivers whose log is their key."""

    def log(self, key: object, start: int, most: int) -> tuple[bytes, int]:
        text = f"{key}\n".encode()
        return text[start : start + most], len(text)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def desk(tmp_path: Path, store: Store, clock: VirtualClock) -> ApiService:
    return ApiService(
        store=store,
        config=load_cluster(LOCAL),
        bill=NoMachines(),
        drivers=Echo(),  # type: ignore[arg-type]
        clock=clock,
        live=tmp_path / "live.json",
        serve_url="http://127.0.9.1:8000",
        ray_url="http://127.0.9.1:8265",
        ray_environment={"RAY_AUTH_MODE": "token"},
    )


@pytest.fixture
def client(tmp_path: Path, desk: ApiService) -> Iterator[TestClient]:
    tokens = {
        "secret": {"user": "ana", "team": "default"},
        "other": {"user": "bob", "team": "research"},
        "root": {"user": "root", "team": "*"},
    }
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    with TestClient(create_app(desk, Tokens(tmp_path / "tokens.json"))) as client:
        client.headers["Authorization"] = "Bearer secret"
        yield client


def error(response: object) -> dict[str, str]:
    body: dict[str, str] = response.json()["error"]  # type: ignore[attr-defined]
    return body


def loop_here() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class TestAuthentication:
    def test_health_needs_no_token(self, client: TestClient) -> None:
        assert client.get("/health", headers={"Authorization": ""}).json()["ok"] is True

    @pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic secret"])
    def test_everything_else_needs_a_known_token(self, client: TestClient, header: str) -> None:
        response = client.get("/v1/status", headers={"Authorization": header})
        assert response.status_code == 401
        assert error(response)["code"] == "not_authenticated"

    def test_a_token_of_one_team_does_nothing_for_another(self, client: TestClient) -> None:
        job = client.post("/v1/jobs", json=GANG).json()["job"]["id"]
        other = {"Authorization": "Bearer other"}
        reads, writes = ("", "/logs", "/lease", "/why"), ("/stop", "/retry", "/report", "/release")
        for method, path in [*(("GET", path) for path in reads), *(("POST", path) for path in writes)]:
            assert client.request(method, f"/v1/jobs/{job}{path}", headers=other, json={}).status_code == 403
        assert client.post("/v1/jobs", json={**GANG, "team": "default"}, headers=other).status_code == 403
        assert client.get("/v1/jobs", headers=other).json() == []


class TestTokensOfJobs:
    """They belong to a driver, or to the processes of a user's script."""

    KEY = b"k" * 32

    @pytest.fixture
    def jobs(self, store: Store) -> None:
        """job-1 and job-2 are ana's, job-3 another user's of her team, job-4 another team's."""
        for user, team in (("ana", "default"), ("ana", "default"), ("eve", "default"), ("bob", "research")):
            store.submit_job(JobSpec.parse({**GANG, "team": team}, where="job"), user, 1000.0)

    @pytest.fixture
    def asked(self, jobs: None, tmp_path: Path, store: Store, desk: ApiService) -> Iterator[TestClient]:
        (tmp_path / "tokens.json").write_text("{}")
        tokens = Tokens(tmp_path / "tokens.json", JobTokens(self.KEY, store))
        with TestClient(create_app(desk, tokens)) as client:
            client.headers["Authorization"] = f"Bearer {token_of('job-1', self.KEY)}"
            yield client

    def test_they_act_on_their_own_job_and_submit_as_its_user_in_its_team(self, asked: TestClient) -> None:
        for path in ("", "/lease", "/why"):
            assert asked.get(f"/v1/jobs/job-1{path}").status_code == 200
        assert asked.post("/v1/jobs/job-1/report", json={"step": 1}).status_code == 200
        child = asked.post("/v1/jobs", json=GANG).json()["job"]
        assert (child["user"], child["spec"]["team"]) == ("ana", "default")
        assert asked.post(f"/v1/jobs/{child['id']}/stop").status_code == 200

    @pytest.mark.parametrize("path", ["/stop", "/retry", "/report", "/release", "/lease"])
    def test_they_change_no_other_users_job_and_see_no_other_teams(self, asked: TestClient, path: str) -> None:
        method = "GET" if path == "/lease" else "POST"
        for job in ("job-3", "job-4"):
            assert asked.request(method, f"/v1/jobs/{job}{path}", json={}).status_code == 403
        assert asked.get("/v1/jobs/job-3").status_code == 200, "their team's"
        assert asked.get("/v1/jobs/job-4").status_code == 403

    def test_they_are_no_operators_and_set_no_budget(self, asked: TestClient) -> None:
        for method, path in (
            ("GET", "/v1/plans"),
            ("GET", "/v1/snapshot"),
            ("PATCH", "/v1/teams/default"),
            ("PUT", "/v1/jobs/job-1/budget?usd=1"),
        ):
            assert asked.request(method, path, json={}).status_code == 403, path

    def test_they_end_with_their_job(self, asked: TestClient, store: Store) -> None:
        over = replace(store.job("job-1"), state=JobState.SUCCEEDED, ended_at_s=1001.0)
        store.commit(Changes(1001.0, jobs=(over,)))
        response = asked.get("/v1/jobs/job-1")
        assert response.status_code == 401
        assert "job-1 is succeeded" in error(response)["message"]

    @pytest.mark.parametrize(
        "forged", ["rtjob_job-4.{code}", "rtjob_job-1.", "rtjob_.{code}", "rtjob_job-9.{code}", "rtjob_é.x"]
    )
    def test_a_forged_one_is_refused(self, asked: TestClient, forged: str) -> None:
        code = token_of("job-1", self.KEY).rpartition(".")[2]
        given = f"Bearer {forged.format(code=code)}".encode()
        assert asked.get("/v1/status", headers={"Authorization": given}).status_code == 401

    def test_another_clusters_key_makes_none_of_this_one(self, asked: TestClient) -> None:
        header = {"Authorization": f"Bearer {token_of('job-1', b'other' * 7)}"}
        assert asked.get("/v1/status", headers=header).status_code == 401


class TestPlaces:
    """Trainers, builds and endpoints act as raytide's user, not as theirs."""

    @pytest.mark.parametrize(
        "job",
        [
            {"kind": "data", "config": {"inputs": ["/root/../proc/self/environ"], "out": "/data/x"}},
            {"kind": "data", "config": {"inputs": ["/data/x"], "out": "~/.ssh"}},
            {"kind": "train", "config": {"dataset": "file:///etc/x", "out": "/data/x", "steps": 1}},
        ],
    )
    def test_a_job_that_names_a_private_one_is_refused(self, client: TestClient, job: dict[str, object]) -> None:
        response = client.post("/v1/jobs", json={**GANG, **job})
        assert (response.status_code, error(response)["code"]) == (403, "denied")
        assert client.get("/v1/jobs").json() == []

    def test_an_endpoint_of_one_too(self, client: TestClient) -> None:
        response = client.post("/v1/endpoints", json={"name": "x", "model": "/etc", "resources": {"CPU": 1}})
        assert (response.status_code, error(response)["code"]) == (403, "denied")


class TestJobs:
    def test_a_submitted_job_waits_in_the_queue_with_its_place(self, client: TestClient, tmp_path: Path) -> None:
        first, _ = (client.post("/v1/jobs", json=GANG).json() for _ in range(2))
        assert (first["job"]["state"], first["position"]) == ("queued", None), "no decision has seen it yet"
        (tmp_path / "live.json").write_text(json.dumps({"at_s": 1000.0, "queue": ["job-2", "job-1"]}))
        assert [view["position"] for view in client.get("/v1/jobs").json()] == [1, 2]
        assert [view["job"]["id"] for view in client.get("/v1/jobs").json()] == ["job-2", "job-1"]

    def test_those_that_are_not_over_are_found_behind_those_that_are(self, client: TestClient, store: Store) -> None:
        for _ in range(3):
            client.post("/v1/jobs", json=GANG)
        store.commit(Changes(1000.0, jobs=(replace(store.job("job-2"), state=JobState.FAILED, ended_at_s=1000.0),)))
        page = client.get("/v1/jobs", params={"active": True, "limit": 2}).json()
        assert [view["job"]["id"] for view in page] == ["job-3", "job-1"]

    def test_a_gang_that_is_whole_waits_no_longer_for_its_members(
        self, client: TestClient, store: Store, tmp_path: Path
    ) -> None:
        """The controller's words are of its last look."""
        client.post("/v1/jobs", json=GANG)
        live = {"at_s": 1000.0, "waiting": {"job-1": {"constraint": "starting", "reason": "lease-1 has 0 of 2"}}}
        (tmp_path / "live.json").write_text(json.dumps(live))
        job = replace(store.job("job-1"), state=JobState.RUNNING)
        for states, is_shown in (("forming ready", True), ("ready ready", False)):
            members = tuple(Member(n, state=MemberState(s)) for n, s in enumerate(states.split()))
            lease = Lease("lease-1", "job-1", job.spec.gang.shapes[0], LeaseState.ACTIVE, members)
            store.commit(Changes(1000.0, jobs=(job,), leases=(lease,)))
            assert (client.get("/v1/jobs/job-1").json()["waiting"] is not None) == is_shown, states

    def test_what_names_no_team_is_its_tokens(self, client: TestClient, desk: ApiService) -> None:
        desk.accounts._config.settings.teams["research"] = TeamSpec()
        for token, team in (("secret", "default"), ("other", "research"), ("root", "default")):
            body = {name: value for name, value in GANG.items() if name != "team"}
            answer = client.post("/v1/jobs", json=body, headers={"Authorization": f"Bearer {token}"})
            assert answer.json()["job"]["spec"]["team"] == team
        named = {**GANG, "team": "default"}
        assert client.post("/v1/jobs", json=named, headers={"Authorization": "Bearer other"}).status_code == 403

    def test_the_same_key_queues_one_job(self, client: TestClient) -> None:
        ids = {client.post("/v1/jobs", json=GANG, params={"key": "k"}).json()["job"]["id"] for _ in range(3)}
        assert ids == {"job-1"}

    def test_a_key_is_its_team_s_and_goes_with_what_was_asked_for(self, client: TestClient, desk: ApiService) -> None:
        desk.accounts._config.settings.teams["research"] = TeamSpec()

        def submit(body: dict[str, object], token: str = "secret", key: str = "k") -> httpx.Response:
            return client.post("/v1/jobs", json=body, params={"key": key}, headers={"Authorization": f"Bearer {token}"})

        late = {**GANG, "deadline": "8h"}
        assert [submit(late).json()["job"]["id"] for _ in range(2)] == ["job-1", "job-1"]
        assert submit(GANG, "other").json()["job"]["id"] == "job-2", "another team's"
        assert submit(late, "root").json()["job"]["id"] == "job-1", "whoever of the team asks"
        refused = submit({**GANG, "name": "another"})
        assert (refused.status_code, "job-1" in error(refused)["message"]) == (409, True)
        for bad in ("", " ", "a b", "k" * 129, "\0", "\ud7ff", "naïve"):
            assert submit(GANG, key=bad).status_code == 400

    @pytest.mark.parametrize("has_process", [False, True])
    def test_a_flow_that_is_stopped_while_it_has_no_process_ends_with_its_stages(
        self, client: TestClient, store: Store, has_process: bool
    ) -> None:
        def submit(user: str, key: str, **env: str) -> str:
            config = {"command": ["true"], "env": env}
            spec = JobSpec.parse({**GANG, "kind": "script", "team": "default", "config": config}, where="job")
            return store.submit_job(spec, user, 1000.0, key=key).id

        flow = submit("ana", "mine", RAYTIDE_FLOW_RUN="f_-1a")
        stage, trial = submit("ana", "f_-1a-1-train-1"), submit("ana", "f_-1a-1-tune-trial-0-1")
        others = [submit("ana", "fx-1a-1-train-1"), submit("eve", "f_-1a-1-train-2")]
        if has_process:
            running = replace(store.job(flow), state=JobState.RUNNING)
            members = (Member(0, state=MemberState.READY),)
            lease = Lease("lease-1", flow, running.spec.gang.shapes[0], LeaseState.ACTIVE, members)
            store.commit(Changes(1000.0, jobs=(running,), leases=(lease,)))
        assert client.post(f"/v1/jobs/{flow}/stop").json()["job"]["stop_requested"] is True
        asked = {job.id for job in store.jobs() if job.stop_requested}
        assert asked == ({flow} if has_process else {flow, stage, trial})
        assert not asked.intersection(others)

    def test_an_unknown_key_is_named_with_its_nearest(self, client: TestClient) -> None:
        response = client.post("/v1/jobs", json={**GANG, "tema": "x"})
        assert response.status_code == 400
        assert "did you mean team" in error(response)["message"]

    def test_a_deadline_from_now_is_a_moment_once_submitted_and_shown_with_what_it_means(
        self, client: TestClient, tmp_path: Path
    ) -> None:
        asked = {**GANG, "deadline": "8h", "estimate_h": 3}
        job = client.post("/v1/jobs", json=asked).json()["job"]
        assert job["spec"]["deadline"] == "1970-01-01T08:16:40+00:00"
        stance = MarketConstraint((CapacityType.SPOT,), False, 29800.0, 11340.0, 17000.0, "on spot: 3.1 h of work")
        write_json(tmp_path / "live.json", to_json(Live(1000.0, stances={job["id"]: stance})))
        assert client.get(f"/v1/jobs/{job['id']}").json()["stance"]["reason"] == stance.reason
        assert client.get(f"/v1/jobs/{job['id']}/why").json()["stance"]["markets"] == ["spot"]

    def test_a_deadline_that_nobody_can_keep_is_refused(self, client: TestClient) -> None:
        for deadline, words in (
            ("2s", "it needs 3 h"),
            ("1970-01-01T00:00Z", "is past"),
            ("1970-01-02", "no time zone"),
        ):
            response = client.post("/v1/jobs", json={**GANG, "deadline": deadline, "estimate_h": 3})
            assert response.status_code == 400 and words in error(response)["message"]

    def test_a_job_that_was_late_is_tried_again_without_its_deadline(
        self, client: TestClient, store: Store, clock: VirtualClock
    ) -> None:
        for deadline in ("1h", "3h"):
            job = client.post("/v1/jobs", json={**GANG, "deadline": deadline}).json()["job"]["id"]
            ended = replace(store.job(job), state=JobState.STOPPED, ended_at_s=clock.now_s())
            store.commit(Changes(at_s=clock.now_s(), jobs=(ended,)))
        clock.advance(2 * 3600.0)
        again = [client.post(f"/v1/jobs/job-{n}/retry").json()["job"]["spec"]["deadline"] for n in (1, 2)]
        assert again == [None, "1970-01-01T03:16:40+00:00"]

    def test_a_gang_that_no_node_type_can_hold_is_refused_at_once(self, client: TestClient) -> None:
        huge = {**GANG, "gang": {"shapes": [{"members": 1, "resources": {"GPU": 9}}]}}
        response = client.post("/v1/jobs", json=huge)
        assert (response.status_code, error(response)["code"]) == (400, "cannot_fit")
        assert error(response)["hint"]

    def test_a_script_needs_its_package_which_is_what_its_digest_says(self, client: TestClient) -> None:
        files = b"PK\5\6" + bytes(18)  # an empty zip file
        digest = hashlib.sha256(files).hexdigest()
        script = {**GANG, "kind": "script", "config": {"command": ["python", "x.py"], "package": digest}}
        assert error(client.post("/v1/jobs", json=script))["code"] == "not_found"
        assert error(client.put(f"/v1/packages/{digest}", content=b"other"))["code"] == "bad_data"
        assert error(client.put("/v1/packages/state.db", content=files))["code"] == "usage"
        assert client.put(f"/v1/packages/{digest}", content=files).status_code == 200
        assert client.get(f"/v1/packages/{digest}").status_code == 403, "nobody's yet"
        assert client.post("/v1/jobs", json=script).json()["job"]["state"] == "queued"
        assert client.get(f"/v1/packages/{digest}").content == files
        assert client.get(f"/v1/packages/{digest}", headers={"Authorization": "Bearer root"}).content == files
        assert client.get(f"/v1/packages/{digest}", headers={"Authorization": "Bearer other"}).status_code == 403
        assert client.get(f"/v1/packages/{digest}", headers={"Authorization": ""}).status_code == 401

    def test_packages_make_room_for_one_that_is_uploaded_but_not_those_of_jobs(
        self, client: TestClient, tmp_path: Path
    ) -> None:
        def upload(comment: bytes) -> str:
            body = b"PK\5\6" + bytes(16) + bytes([len(comment), 0]) + comment
            digest = hashlib.sha256(body).hexdigest()
            assert client.put(f"/v1/packages/{digest}", content=body).status_code == 200
            os.utime(tmp_path / "packages" / f"{digest}.zip", (1.0, 1.0))
            return digest

        used = upload(b"used")
        script = {"command": ["python", "x.py"], "package": used}
        client.post("/v1/jobs", json={**GANG, "kind": "script", "config": script})
        os.utime(tmp_path / "packages" / f"{used}.zip", (1.0, 1.0))
        upload(b"old")
        new = upload(b"new")
        assert {path.stem for path in (tmp_path / "packages").iterdir()} == {used, new}

    def test_the_event_loop_does_not_wait_for_the_disk_of_an_upload(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loops: list[object] = []
        sync = os.fsync

        def note(file: int) -> None:
            loops.append(loop_here())
            sync(file)

        monkeypatch.setattr(os, "fsync", note)
        body = b"PK\5\6" + bytes(18)
        assert client.put(f"/v1/packages/{hashlib.sha256(body).hexdigest()}", content=body).status_code == 200
        assert loops == [None]

    def test_an_upload_that_is_broken_off_leaves_nothing(self, desk: ApiService, tmp_path: Path) -> None:
        (tmp_path / "tokens.json").write_text(json.dumps({"secret": {"user": "ana", "team": "default"}}))
        (tmp_path / "tokens.json").chmod(0o600)
        sent: list[Message] = [{"type": "http.request", "body": b"PK", "more_body": True}, {"type": "http.disconnect"}]

        async def receive() -> Message:
            return sent.pop(0)

        async def send(message: Message) -> None:
            pass

        path = "/v1/packages/" + "a" * 64
        headers = [(b"authorization", b"Bearer secret"), (b"transfer-encoding", b"chunked")]
        scope = {"type": "http", "method": "PUT", "path": path, "raw_path": b"", "query_string": b""}
        app = create_app(desk, Tokens(tmp_path / "tokens.json"))
        asyncio.run(app({**scope, "headers": headers}, receive, send))
        assert sent == [] and list((tmp_path / "packages").iterdir()) == []

    def test_a_driver_that_hangs_up_has_a_moment_to_ask_again(
        self, client: TestClient, clock: VirtualClock, desk: ApiService, store: Store
    ) -> None:
        job = client.post("/v1/jobs", json=GANG).json()["job"]["id"]
        client.get(f"/v1/jobs/{job}/lease")
        desk.jobs.leases.on_disconnect([job])
        assert store.job(job).heartbeat_at_s == -clock.now_s()
        client.get(f"/v1/jobs/{job}/lease")
        assert store.job(job).heartbeat_at_s == clock.now_s(), "it lives"

    def test_what_waits_without_a_lease_is_told_to_everybody(self, client: TestClient, tmp_path: Path) -> None:
        assert "no work" in client.get("/v1/jobs/unmanaged/why").json()["reason"]
        said = {"constraint": "cap", "reason": "work without a lease waits.", "remedy": "Submit it as a job."}
        (tmp_path / "live.json").write_text(json.dumps({"at_s": 1.0, "waiting": {"unmanaged": said}}))
        assert said.items() <= client.get("/v1/jobs/unmanaged/why").json().items()

    def test_a_training_job_without_its_dataset_is_refused(self, client: TestClient, tmp_path: Path) -> None:
        config = {"dataset": str(tmp_path / "none"), "out": str(tmp_path / "out"), "steps": 1}
        root = {"Authorization": "Bearer root"}
        response = client.post("/v1/jobs", json={**GANG, "kind": "train", "config": config}, headers=root)
        assert (response.status_code, error(response)["code"]) == (400, "bad_data")

    def test_an_unknown_team_is_refused(self, client: TestClient) -> None:
        assert client.post("/v1/jobs", json={**GANG, "team": "ghosts"}).status_code in (400, 403)

    def test_an_unknown_job_is_not_found(self, client: TestClient) -> None:
        assert error(client.get("/v1/jobs/job-99"))["code"] == "not_found"

    def test_stop_is_remembered(self, client: TestClient, store: Store) -> None:
        client.post("/v1/jobs", json=GANG)
        assert client.post("/v1/jobs/job-1/stop").json()["job"]["stop_requested"] is True
        assert store.job("job-1").stop_requested

    def test_a_report_that_no_list_of_jobs_could_show_is_refused(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=GANG)
        response = client.post("/v1/jobs/job-1/report", json={"step": 1, "losses": [2.5]})
        assert (response.status_code, "losses" in error(response)["message"]) == (400, True)
        assert client.get("/v1/jobs/job-1").json()["job"]["progress"] == {}

    def test_a_report_of_more_than_64_bits_is_refused(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=GANG)
        response = client.post("/v1/jobs/job-1/report", json={"step": 1, "left_s": 10**400})
        assert (response.status_code, "left_s" in error(response)["message"]) == (400, True)

    def test_reports_add_up_by_name(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=GANG)
        client.post("/v1/jobs/job-1/report", json={"step": 1, "loss": 2.5})
        client.post("/v1/jobs/job-1/report", json={"step": 2})
        assert client.get("/v1/jobs/job-1").json()["job"]["progress"] == {"step": 2, "loss": 2.5}

    def test_a_log_comes_from_where_one_was_or_its_last_lines(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=SCRIPT)
        whole = client.get("/v1/jobs/job-1/logs").json()
        assert ("attempt=0" in whole["text"], whole["has_more"]) == (True, False)
        assert client.get("/v1/jobs/job-1/logs", params={"after": whole["after"]}).json()["text"] == ""
        assert client.get("/v1/jobs/job-1/logs", params={"tail": 1}).json()["text"] == whole["text"]
        for odd in ({"tail": -1}, {"tail": "x"}, {"after": "-1:2"}, {"after": "1"}):
            assert client.get("/v1/jobs/job-1/logs", params=odd).status_code == 400, odd

    def test_a_gang_has_no_log_here_which_is_said(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=GANG)
        response = client.get("/v1/jobs/job-1/logs")
        assert (response.status_code, "ray job logs" in error(response)["hint"]) == (400, True)

    @pytest.mark.parametrize(
        ("nccl", "status"),
        [
            ({"NCCL_NET_PLUGIN": "theirs"}, 403),
            ({"NCCL_CUDA_PATH": "/data/theirs"}, 403),
            ({"NCCL_SOCKET_IFNAME": "eth1"}, 200),
        ],
    )
    def test_libraries_for_nccl_are_refused_where_run_as_separates_users(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch, nccl: dict[str, str], status: int
    ) -> None:
        config = {"dataset": "s3://data/tokens", "out": "s3://data/run", "steps": 1, "model": {"vocab_size": 512}}
        gang = {"shapes": [{"members": 1, "resources": {"CPU": 1}}]}
        body = {"kind": "train", "name": "t", "gang": gang, "config": {**config, "nccl": nccl}}
        with monkeypatch.context() as separated:
            separated.setattr(RaytideSection, "user_of", lambda *_: "nobody")
            assert client.post("/v1/jobs", json=body).status_code == status
        assert client.post("/v1/jobs", json=body).status_code == 200


class TestLeases:
    def test_a_job_in_the_queue_has_a_lease_that_waits(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=GANG)
        lease = client.get("/v1/jobs/job-1/lease").json()
        assert (lease["state"], lease["epoch"], lease["members"]) == ("waiting", -1, [])

    def test_asking_keeps_a_gang_alive(self, client: TestClient, store: Store, clock: VirtualClock) -> None:
        client.post("/v1/jobs", json=GANG)
        clock.advance(5)
        client.get("/v1/jobs/job-1/lease")
        assert store.job("job-1").heartbeat_at_s == 1005.0

    def test_only_who_may_act_on_a_gang_keeps_it_alive(
        self, client: TestClient, store: Store, clock: VirtualClock
    ) -> None:
        client.post("/v1/jobs", json=GANG)
        before = store.job("job-1").heartbeat_at_s
        clock.advance(5)
        answer = client.get("/v1/jobs/job-1/lease", headers={"Authorization": "Bearer other"})
        assert answer.status_code in (401, 403)
        assert store.job("job-1").heartbeat_at_s == before

    def test_the_lease_is_shown_as_the_controller_wrote_it(self, client: TestClient, store: Store) -> None:
        client.post("/v1/jobs", json=GANG)
        job = store.job("job-1")
        members = (Member(0, MemberState.READY, "node-1", "ab", "127.0.9.2", "cd"),)
        lease = Lease("lease-1", "job-1", job.spec.gang.shapes[0], LeaseState.ACTIVE, members, epoch=3)
        store.commit(Changes(at_s=1001.0, jobs=(replace(job, state=JobState.RUNNING),), leases=(lease,)))
        shown = client.get("/v1/jobs/job-1/lease", params={"newer_than": 2, "timeout_s": 5}).json()
        assert (shown["epoch"], shown["members"][0]["placement_group_id"]) == (3, "cd")

    def test_the_lease_of_a_job_that_is_over_is_lost(self, client: TestClient, store: Store) -> None:
        client.post("/v1/jobs", json=GANG)
        over = replace(store.job("job-1"), state=JobState.FAILED, reason="it broke")
        store.commit(Changes(at_s=1001.0, jobs=(over,)))
        response = client.get("/v1/jobs/job-1/lease")
        assert (response.status_code, error(response)["code"]) == (410, "lease_lost")
        assert "it broke" in error(response)["message"]


class TestEndpoints:
    def test_a_model_directory_must_be_one(self, client: TestClient, tmp_path: Path) -> None:
        response = client.post(
            "/v1/endpoints", json={"name": "m", "model": str(tmp_path)}, headers={"Authorization": "Bearer root"}
        )
        assert (response.status_code, error(response)["code"]) == (400, "bad_data")

    @pytest.mark.parametrize("name", ["job-1", "lease-20", "node-3", "cluster", "unmanaged"])
    def test_a_name_that_raytide_gives_itself_is_refused(self, client: TestClient, tmp_path: Path, name: str) -> None:
        (tmp_path / "config.json").write_text("{}")
        response = client.post("/v1/endpoints", json={"name": name, "model": str(tmp_path)})
        assert (response.status_code, name in error(response)["message"]) == (400, True)
        assert client.get("/v1/endpoints").json() == []

    def test_an_endpoint_has_an_openai_url(self, client: TestClient, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        status = client.post("/v1/endpoints", json={"name": "m", "model": str(tmp_path)}).json()
        assert status["base_url"] == "http://127.0.9.1:8000/m/v1"
        assert status["endpoint"]["state"] == "deploying"
        assert (status["cold_start_s"], status["cold_start_is_learned"]) == (60.0, False)

    @pytest.mark.parametrize(
        ("own", "status"),
        [
            ({"trust_remote_code": True}, 403),
            ({"worker_cls": "theirs.Worker", "seed": 1}, 403),
            ({"trust_remote_code": False, "gpu_memory_utilization": 0.5}, 200),
        ],
    )
    def test_options_that_run_code_are_refused_where_run_as_separates_users(
        self,
        client: TestClient,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        own: dict[str, object],
        status: int,
    ) -> None:
        (tmp_path / "config.json").write_text("{}")
        body = {"name": "m", "model": str(tmp_path), "engine": {"kind": "vllm", "vllm": own}}
        with monkeypatch.context() as separated:
            separated.setattr(RaytideSection, "user_of", lambda *_: "nobody")
            assert client.post("/v1/endpoints", json=body).status_code == status
        assert client.post("/v1/endpoints", json=body).status_code == 200

    def test_delete_shows_at_once(self, client: TestClient, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        client.post("/v1/endpoints", json={"name": "m", "model": str(tmp_path)})
        assert client.delete("/v1/endpoints/m").json()["endpoint"]["state"] == "deleting"

    def test_who_takes_over_a_name_does_not_see_what_its_former_owner_paid(
        self, client: TestClient, store: Store, tmp_path: Path
    ) -> None:
        (tmp_path / "config.json").write_text("{}")
        root = {"Authorization": "Bearer root"}
        client.post("/v1/endpoints", json={"name": "m", "model": str(tmp_path)})
        before = Entry("node-1", 0, 1, EntryKind.ENDPOINT, "m", "research", 1, 700)
        store.commit(
            Changes(
                at_s=1000.0, entries=(before, replace(before, node_id="node-2", team="default", amount_micro_usd=30))
            )
        )
        assert client.get("/v1/endpoints/m").json()["cost_micro_usd"] == 30
        assert client.get("/v1/endpoints/m", headers=root).json()["cost_micro_usd"] == 730

    def test_an_unknown_endpoint_is_not_found(self, client: TestClient) -> None:
        assert client.get("/v1/endpoints/none").status_code == 404


class TestCluster:
    def test_metrics_are_prometheus_text(self, client: TestClient) -> None:
        client.post("/v1/jobs", json=GANG)
        text = client.get("/metrics", headers={"Authorization": ""}).text
        assert 'raytide_jobs{kind="gang",state="queued",team="default"} 1.0' in text

    def test_all_metrics_pages_are_listed_for_prometheus_without_a_token(
        self, client: TestClient, tmp_path: Path
    ) -> None:
        announce(tmp_path, "gateway-0", Target("raytide-gateway", "127.0.2.1:4001"))
        found = (Target("raytide-gpu", "127.0.2.2:9400", labels={"node": "node-1"}),)
        write_json(tmp_path / "live.json", to_json(Live(1000.0, targets=found)))
        listed = client.get("/v1/targets", headers={"Authorization": ""}).json()
        assert listed == [
            {"targets": ["127.0.2.1:4001"], "labels": {"job": "raytide-gateway", "__metrics_path__": "/metrics"}},
            {
                "targets": ["127.0.2.2:9400"],
                "labels": {"job": "raytide-gpu", "__metrics_path__": "/metrics", "node": "node-1"},
            },
        ]

    def test_what_replicas_and_meters_said_last_is_shown(self, client: TestClient, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        client.post("/v1/endpoints", json={"name": "m", "model": str(tmp_path)})
        replicas = tuple(ReplicaLoad(name, 1000.0, kv_use=use) for name, use in (("a", 0.5), ("b", 1.0)))
        paces = {"l4": 1.0, "h100": 5.0}
        traffic = Traffic(2.0, ttft_s=0.25, ahead_rps=3.0, cold_start_s=140.0, paces=paces)
        load = EndpointLoad(1000.0, 7.0, 2, replicas=replicas, traffic=traffic)
        live = Live(1000.0, loads={"m": load}, use={"node-1": {"gpu": Signal(0.97, 999.0)}})
        write_json(tmp_path / "live.json", to_json(live))
        status = client.get("/v1/endpoints/m").json()
        assert (status["ready_replicas"], status["ongoing"]) == (2, 7.0)
        (status,) = client.get("/v1/endpoints").json()
        told = status["cold_start_s"], status["cold_start_is_learned"], status["paces"]
        assert told == (140.0, True, paces)
        text = client.get("/metrics").text
        for line in (
            'raytide_endpoint_kv_use_ratio{endpoint="m"} 0.75',
            'raytide_endpoint_first_token_seconds{endpoint="m"} 0.25',
            'raytide_endpoint_forecast_requests_per_second{endpoint="m"} 3.0',
            'raytide_node_use_ratio{meter="gpu",node="node-1"} 0.97',
        ):
            assert line in text

    def test_metrics_say_what_endpoints_promise(self, client: TestClient, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        kept = {"min": 1, "slo_ttft_s": 0.5, "slo_target": 0.995}
        for name, replicas in (("none", {}), ("soft", {"slo_ttft_s": 2}), ("kept", kept)):
            client.post("/v1/endpoints", json={"name": name, "model": str(tmp_path), "replicas": replicas})
        promises = [line for line in client.get("/metrics").text.splitlines() if line.startswith("raytide_slo_")]
        assert promises == [
            'raytide_slo_first_token_seconds{endpoint="kept"} 0.5',
            'raytide_slo_first_token_seconds{endpoint="soft"} 2.0',
            'raytide_slo_error_budget_ratio{endpoint="kept"} 0.005',
            'raytide_slo_error_budget_ratio{endpoint="soft"} 0.01',
        ]

    def test_status_of_an_empty_cluster(self, client: TestClient) -> None:
        status = client.get("/v1/status").json()
        assert (status["nodes"], status["jobs"], status["controller_age_s"]) == ([], {}, None)

    def test_plans_can_be_asked_for_as_of_a_time(self, client: TestClient, store: Store) -> None:
        for at_s in (1.0, 2.0):
            store.commit(Changes(at_s, plan=Plan(at_s, (Wait("job-1", "capacity", f"full at {at_s}"),))))
        assert client.get("/v1/plans").status_code == 403, "they show every team's jobs"
        client.headers["Authorization"] = "Bearer root"
        assert [plan["at_s"] for plan in client.get("/v1/plans").json()] == [1.0, 2.0]
        assert [plan["at_s"] for plan in client.get("/v1/plans?until_s=1.5").json()] == [1.0]

    def test_a_snapshot_is_the_controller_s_own_answer(
        self, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Path] = []
        monkeypatch.setattr(
            "raytide.control.api.services.service.request_snapshot",
            lambda folder: asked.append(folder) or '{"at_s": 7.0}',
        )
        assert client.get("/v1/snapshot").status_code == 403, "it shows every team's jobs"
        assert client.get("/v1/snapshot", headers={"Authorization": "Bearer root"}).json() == {"at_s": 7.0}
        assert asked == [tmp_path]

    def test_cost_of_an_empty_cluster_is_nothing(self, client: TestClient) -> None:
        assert client.get("/v1/cost").json()["billed_micro_usd"] == 0

    @pytest.mark.parametrize("since_s", ["nan", "inf", "-inf", "-1", "1e300", "x"])
    def test_a_time_that_is_none_is_refused_by_name(self, client: TestClient, since_s: str) -> None:
        refused = client.get("/v1/cost/team", params={"since_s": since_s})
        assert refused.status_code == 400
        assert "since_s" in error(refused)["message"]


def test_those_who_read_long_runs_keep_nobody_from_logs(
    client: TestClient, desk: ApiService, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on = threading.Semaphore(0), threading.Event()

    def curves(*_: object) -> bool:
        asked.release()
        return go_on.wait(60)

    monkeypatch.setattr(desk.jobs, "curves", curves)
    client.post("/v1/jobs", json=SCRIPT)
    read: list[int] = []
    readers = [threading.Thread(target=client.get, args=("/v1/jobs/job-1/metrics",)) for _ in range(12)]
    other = threading.Thread(target=lambda: read.append(client.get("/v1/jobs/job-1/logs").status_code))
    for each in readers:
        each.start()
    try:
        assert asked.acquire(timeout=60)
        while asked.acquire(timeout=0.5):
            pass
        other.start()
        other.join(30)
        assert read == [200]
    finally:
        go_on.set()
        for each in (*readers, other):
            if each.ident is not None:
                each.join(60)


def test_a_broken_token_file_changes_nothing_until_it_is_whole_again(tmp_path: Path, desk: ApiService) -> None:
    file = tmp_path / "tokens.json"
    with TestClient(create_app(desk, Tokens(file)), raise_server_exceptions=False) as http:

        def asked(token: str = "one") -> int:
            return http.get("/v1/jobs", headers={"Authorization": f"Bearer {token}"}).status_code

        assert asked() == 503, "it was never there"
        file.write_text(json.dumps({"one": {"user": "ana", "team": "research"}}))
        assert asked() == 200
        for broken in (
            '{"one": {"us',
            "[]",
            '{"one": {"user": "ana"}}',
            '{"one": {"user": 1, "team": "*"}}',
            "[" * 9999,
        ):
            file.write_text(broken)
            assert (asked(), asked("two")) == (200, 401), broken
        file.unlink()
        assert (asked(), asked("two")) == (200, 401)
        file.write_text(json.dumps({"two": {"user": "ana", "team": "research"}}))
        assert (asked(), asked("two")) == (401, 200)
