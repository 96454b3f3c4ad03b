"""Whatever one team sends, no request ends in a 5xx, no tick fails or takes long, and the other team's job runs."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient
from tests.control.conftest import NoMachines
from tests.control.hostile import Sender
from tests.control.test_controller import CONFIG, Loop

from raytide.actors.serving.metrics import ServingMetrics  # noqa: F401  # loaded before memory is measured
from raytide.control.api.auth import Tokens
from raytide.control.api.routes import create_app
from raytide.control.api.services.service import ApiService
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.core import bounds
from raytide.core.objects.endpoint import EndpointState
from raytide.core.objects.job import JobState
from raytide.core.objects.team import TeamSpec

POSTS = 1000
MOST_TICK_CPU_S = 1.0
QUIET_S = 0.16
"""CPU seconds that `slowness` takes on a quiet core."""
MOST_GROWTH_BYTES = 50 << 20


class Silent:
    def log(self, key: object, start: int, most: int) -> tuple[bytes, int]:
        return b"", 0


class Attack:
    """A control plane in memory, with a token of team `evil` and one of everybody's."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop(folder)
        teams = {"default": TeamSpec(), "evil": TeamSpec()}
        config = CONFIG.model_copy(update={"settings": CONFIG.settings.model_copy(update={"teams": teams})})
        self.loop.controller._config = config
        desk = ApiService(
            store=self.loop.store,
            config=config,
            bill=NoMachines(),
            drivers=Silent(),  # type: ignore[arg-type]
            clock=self.loop.clock,
            live=folder / "live.json",
            serve_url="http://127.0.9.1:8000",
            ray_url="http://127.0.9.1:8265",
            ray_environment={},
        )
        desk.jobs._rate = SubmissionRate(count(0.0, 3600.0).__next__)  # an hour between any two submissions
        tokens = {"evil": {"user": "eve", "team": "evil"}, "root": {"user": "root", "team": "*"}}
        (folder / "tokens.json").write_text(json.dumps(tokens))
        self.http = TestClient(create_app(desk, Tokens(folder / "tokens.json")), raise_server_exceptions=False)
        self.http.headers["Authorization"] = "Bearer evil"

    def send(self, method: str, path: str, body: Any = None) -> int:
        text = None if body is None else json.dumps(body)
        kind = {"content-type": "application/json"}
        response = self.http.request(method, path, content=text, headers=kind)
        assert response.status_code < 500, (method, path, body, response.text[:500])
        return response.status_code

    def root(self, path: str) -> Any:
        response = self.http.get(path, headers={"Authorization": "Bearer root"})
        assert response.status_code == 200, (path, response.text[:500])
        return response

    def tick_cpu_s(self) -> float:
        began_s = time.thread_time()
        self.loop.tick()
        return time.thread_time() - began_s


def is_short(tick_s: float) -> bool:
    return tick_s < MOST_TICK_CPU_S or tick_s < MOST_TICK_CPU_S * slowness()


def slowness() -> float:
    """Returns how much longer work takes now than on a quiet machine: a second of CPU does less beside others."""
    began_s = time.thread_time()
    for _ in range(10):
        json.dumps([{"number": number, "text": str(number)} for number in range(20_000)])
    return (time.thread_time() - began_s) / QUIET_S


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Attack]:
    made = Attack(tmp_path)
    with made.http:
        yield made
    made.loop.store.close()


@pytest.fixture
def frozen(attack: Attack) -> Iterator[None]:
    """For tests that measure ticks: none is charged for walks over whatever the tests before have left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def assault(attack: Attack, seed: int, posts: int, folder: Path) -> None:
    """Post, tick after each, and look at everything now and then."""
    model, chat = folder / "model", folder / "chat.jsonl"
    model.mkdir()
    (model / "config.json").write_text("{}")
    chat.write_text("{}\n")
    sender, loop = Sender(seed, str(model), str(chat)), attack.loop
    loop.tick(2)
    accepted, worst_s, resident = 0, 0.0, 0
    for number in range(posts):
        names = [endpoint.name for endpoint in loop.store.endpoints()]
        request = sender.request(accepted, names)
        accepted += attack.send(*request) == 200 and request[1] == "/v1/jobs"
        tick_s = attack.tick_cpu_s()
        worst_s = max(worst_s, tick_s)
        assert is_short(tick_s), (number, tick_s, request)
        assert loop.controller._quarantine.held == {}, request
        assert not loop.controller._quarantine.errors, request
        if number % 100 == 50:
            for path in ("/v1/jobs?limit=1000", "/v1/endpoints", "/v1/status", "/v1/plans", "/v1/cost", "/metrics"):
                attack.root(path)
        if number == min(200, posts // 3):
            resident = psutil.Process().memory_info().rss
        if number % 40 == 39:  # what nobody stops would fill the fleet, and the others would rightly wait
            for job in loop.store.jobs(active=True, limit=10_000):
                attack.loop.store.request_stop(job.id)
            for endpoint in loop.store.endpoints():
                if endpoint.state is not EndpointState.DELETING:
                    loop.store.request_delete(endpoint.name)
            loop.tick(4)
            sane = loop.submit(members=1)
            loop.until(lambda: loop.state(sane) is JobState.RUNNING)  # noqa: B023
            loop.finish(sane)
    assert accepted > posts / 10, "nearly everything was refused: the test tests nothing"
    grown = psutil.Process().memory_info().rss - resident
    assert grown < MOST_GROWTH_BYTES, f"{grown >> 20} MiB more than after the first requests"


@pytest.mark.usefixtures("frozen")
def test_hostile_specs_and_reports_stop_nobody(attack: Attack, tmp_path: Path) -> None:
    assault(attack, 1, POSTS, tmp_path)


GANG: dict[str, Any] = {"kind": "gang", "name": "g", "gang": {"shapes": [{"resources": {"CPU": 1}}]}}


def gang(**shape: Any) -> dict[str, Any]:
    return {**GANG, "gang": {"shapes": [{"resources": {"CPU": 1}, **shape}]}}


@pytest.mark.parametrize(
    "body",
    [
        gang(resources={"CPU": 1e-300}),
        gang(resources={"CPU": 9e-5}),
        gang(resources={"CPU": 1, "GPU": 5e-324}),
        gang(resources={"CPU": 1e300}),
        gang(resources={"GPU": 1.5}),
        gang(resources={f"r{n}": 1 for n in range(17)}),
        gang(resources={"CPU": 1e-9}, members=1_000_000),
        gang(members=100_000, min_members=1),
        gang(labels={"rack": "!\ud800"}),
        gang(labels={"\ud800": "a"}),
        gang(labels={f"l{n}": "a" for n in range(65)}),
        gang(together="\x1b[2J"),
        {**GANG, "gang": {"shapes": [{"resources": {"CPU": 1}}] * 17}},
        {**GANG, "name": "two\nlines"},
        {**GANG, "labels": {"a": "\ud800"}},
        {**GANG, "config": {"a": "\ud800"}},
        {**GANG, "config": {"a": "x" * 65_537}},
        {**GANG, "config": {str(n): "x" * 60_000 for n in range(5)}},
        {**GANG, "config": {"a": 2**65}},
        {**GANG, "budget_usd": 1e300},
        {**GANG, "max_restarts": 10**12},
        {**GANG, "heartbeat_timeout_s": 1e300},
    ],
    ids=lambda body: str(body)[40:100],
)
def test_a_hostile_job_is_refused_with_what_to_do(attack: Attack, body: dict[str, Any]) -> None:
    response = attack.http.post("/v1/jobs", content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert response.json()["error"]["hint"]
    assert attack.loop.store.jobs() == ()


@pytest.mark.parametrize(
    "replicas",
    [
        {"max": 10**9, "slo_ttft_s": 1, "slo_target": 0.9},
        {"min": 1025, "max": 1025},
        {"target_ongoing": 1e-300},
        {"slo_ttft_s": 1, "slo_target": 1 - 1e-16},
        {"cold_start_s": 1e300},
        {"speed": {"cpu2": {"prefill_tps": 1e-300, "slots": 1, "tpot_ms": 1}}},
    ],
)
def test_a_hostile_endpoint_is_refused(attack: Attack, tmp_path: Path, replicas: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert attack.send("POST", "/v1/endpoints", {"name": "e", "model": str(tmp_path), "replicas": replicas}) == 400


class TestReports:
    def test_what_no_encoder_takes_is_replaced_and_every_page_still_shows(self, attack: Attack) -> None:
        assert attack.send("POST", "/v1/jobs", GANG) == 200
        assert attack.send("POST", "/v1/jobs/job-1/report", {"error": "\ud800", "\udfff": 1}) in (200, 400)
        attack.loop.store.report("job-1", {"error": "half \ud83d", "\ud800": 2}, 1.0)
        attack.loop.tick(3)
        progress = next(v["job"]["progress"] for v in attack.root("/v1/jobs").json())
        assert progress["error"] == "half \ufffd"
        assert progress["\ufffd"] == 2

    def test_what_an_earlier_release_stored_is_shown_too(self, attack: Attack) -> None:
        import sqlalchemy as sa

        attack.send("POST", "/v1/jobs", GANG)
        with attack.loop.store._db.write() as c:
            c.execute(sa.text("""update jobs set progress = '{"stage": "\\ud800", "x": NaN}'"""))
        assert attack.root("/v1/jobs").json()[0]["job"]["progress"]["stage"] == "\ufffd"
        attack.loop.tick(3)
        assert attack.root("/v1/jobs/job-1/why").json()["job"] == "job-1"

    def test_they_are_bounded(self, attack: Attack) -> None:
        attack.send("POST", "/v1/jobs", GANG)
        assert attack.send("POST", "/v1/jobs/job-1/report", {"error": "x" * 10_000}) == 200
        assert len(attack.loop.store.job("job-1").progress["error"]) == 4000  # type: ignore[arg-type]
        assert attack.send("POST", "/v1/jobs/job-1/report", {f"n{n}": n for n in range(129)}) == 400
        sent = [attack.send("POST", "/v1/jobs/job-1/report", {f"t{n}": "x" * 3000}) for n in range(10)]
        assert 400 in sent, "all of it together is bounded too"
        assert len(json.dumps(dict(attack.loop.store.job("job-1").progress))) <= 16 << 10


class TestCaps:
    def test_a_team_has_so_many_live_jobs_and_no_more(self, attack: Attack) -> None:
        settings = attack.loop.controller._config.settings
        assert settings.max_live_jobs == 1000
        for _ in range(5):
            attack.loop.store.submit_job(_spec(), "eve", 1.0, most_live=5)
        with pytest.raises(Exception, match="5 unfinished jobs; 5 are allowed") as refused:
            attack.loop.store.submit_job(_spec(), "eve", 1.0, most_live=5)
        assert (refused.value.exit_code, refused.value.http_status) == (3, 429)  # type: ignore[attr-defined]
        attack.loop.store.request_stop("job-1")
        attack.loop.tick(2)
        attack.loop.store.submit_job(_spec(), "eve", 1.0, most_live=5)

    def test_members_beyond_the_team_s_cap_wait_and_say_so(self, attack: Attack) -> None:
        small = {"resources": {"CPU": 1e-4}, "members": 4000}
        for _ in range(3):
            assert attack.send("POST", "/v1/jobs", gang(**small)) == 200
        attack.loop.tick(3)
        states = [attack.loop.state(f"job-{n}") for n in (1, 2, 3)]
        assert states == [JobState.ADMITTED, JobState.ADMITTED, JobState.QUEUED]
        why = attack.root("/v1/jobs/job-3/why").json()
        assert why["constraint"] == "cap"
        assert "8192 are allowed" in why["reason"]

    def test_a_team_s_jobs_have_so_many_shapes_and_no_more(
        self, attack: Attack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each shape of each job is looked at in every tick."""
        monkeypatch.setattr(bounds, "LIVE_SHAPES", 40)
        many = {**GANG, "gang": {"shapes": [{"resources": {"CPU": 1 + n / 100}} for n in range(16)]}}
        assert [attack.send("POST", "/v1/jobs", many) for _ in range(3)] == [200, 200, 429]
        assert attack.send("POST", "/v1/jobs", GANG) == 200, "a job with a single shape is accepted"
        attack.loop.store.request_stop("job-1")
        attack.loop.tick(2)
        assert attack.send("POST", "/v1/jobs", many) == 200

    def test_a_team_s_endpoints_have_so_many_replicas_and_no_more(self, attack: Attack, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")

        def serve(name: str, most: int) -> int:
            spec = {"name": name, "model": str(tmp_path), "replicas": {"max": most}}
            return attack.send("POST", "/v1/endpoints", spec)

        assert [serve(f"e{n}", 1024) for n in range(9)] == [200] * 8 + [429]
        assert serve("e0", 1000) == 200, "a smaller one in its place is taken"
        assert serve("e9", 24) == 200
        assert serve("e0", 1024) == 429, "nor does it grow by a change"


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(
    "speed", [{"cpu2": 1000.0, "cpu1.spot": 500.0, "gpu8": 5000.0}, {"cpu2": 1e9, "cpu1.spot": 1e-3, "gpu8": 1e3}]
)
def test_tiny_replicas_of_endpoints_with_an_slo_take_no_time(
    attack: Attack, tmp_path: Path, speed: dict[str, float]
) -> None:
    """A node has room for ten thousand of them, and few fast ones do the work of a million slow ones."""
    (tmp_path / "config.json").write_text("{}")
    speeds = {name: {"prefill_tps": tps, "slots": 4, "tpot_ms": 10.0} for name, tps in speed.items()}
    replicas = {"min": 2, "max": 400, "slo_ttft_s": 2.0, "slo_target": 0.99, "speed": speeds}
    for n in range(20):
        spec = {"name": f"e{n}", "model": str(tmp_path), "resources": {"CPU": 1e-4 * (1 + n)}, "replicas": replicas}
        assert attack.send("POST", "/v1/endpoints", spec) == 200
    attack.loop.world.ongoing = 1000.0
    for _ in range(12):
        assert is_short(attack.tick_cpu_s())
        assert attack.loop.controller._quarantine.held == {}


def test_a_page_of_large_jobs_is_cut_off_and_goes_on(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that are over do not count against any cap: a thousand of them might have 250 MiB."""
    monkeypatch.setattr(bounds, "MOST_PAGE_BYTES", 25_000)
    for _ in range(5):
        assert attack.send("POST", "/v1/jobs", {**GANG, "config": {"a": "x" * 10_000}}) == 200
    found: list[str] = []
    while page := attack.root(f"/v1/jobs?limit=100&offset={len(found)}").json():
        assert len(page) <= 2
        found += [view["job"]["id"] for view in page]
    assert found == [f"job-{n}" for n in range(5, 0, -1)]
    monkeypatch.setattr(bounds, "MOST_PAGE_BYTES", 1)
    assert len(attack.root("/v1/jobs").json()) == 1


def _spec() -> Any:
    from raytide.core.objects.job import JobSpec

    return JobSpec.parse(GANG | {"team": "evil"}, where="job")
