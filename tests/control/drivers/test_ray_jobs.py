"""Ray's job service, and the agent beside a driver, report on drivers."""

from __future__ import annotations

import gc
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from raytide.control.drivers.ray_jobs import RayJobs, _status
from raytide.core.errors import ClusterError
from raytide.queue.lifecycle.jobs import DriverKey

KEY = DriverKey("job-1", 0)


class Ray:
    """A job service, and an agent that lets parts of files be read."""

    def __init__(self, log: bytes | None) -> None:
        self.log, self.agent = log, "http://agent:1"
        self.is_broken = False
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url))
        if self.is_broken:
            return httpx.Response(500, text="no agent")
        if request.url.host == "ray":
            return httpx.Response(404 if self.log is None else 200, json={"driver_agent_http_address": self.agent})
        assert str(request.url) == "http://agent:1/logs/job-driver-raytide-job-1-0.log"
        assert request.headers["Authorization"] == "Bearer t"
        if not self.log:
            return httpx.Response(404)
        first, last = map(int, request.headers["Range"].removeprefix("bytes=").split("-"))
        if first >= len(self.log):
            return httpx.Response(416, headers={"Content-Range": f"bytes */{len(self.log)}"})
        found = self.log[first : last + 1]
        where = f"bytes {first}-{first + len(found) - 1}/{len(self.log)}"
        return httpx.Response(206, headers={"Content-Range": where}, content=found)

    def drivers(self, folder: Path) -> RayJobs:
        drivers = RayJobs("http://ray", folder, {})
        transport = httpx.MockTransport(self)
        drivers._http = httpx.Client(base_url="http://ray", transport=transport, headers={"Authorization": "Bearer t"})
        return drivers


def test_a_part_of_a_log_is_asked_of_the_agent_beside_its_driver(tmp_path: Path) -> None:
    ray = Ray(b"0123456789")
    drivers = ray.drivers(tmp_path)
    assert [drivers.log(KEY, at, 4) for at in (0, 8, 10)] == [(b"0123", 10), (b"89", 10), (b"", 10)]
    assert [url for url in ray.asked if "agent:1" not in url] == ["http://ray/api/jobs/raytide-job-1-0"]


def test_output_that_cannot_be_read_now_is_not_taken_for_none(tmp_path: Path) -> None:
    """Whoever follows it would print all of it again, or miss it."""
    ray = Ray(None)
    drivers = ray.drivers(tmp_path)
    assert drivers.log(KEY, 0, 4) == (b"", 0)
    ray.log = b""
    assert drivers.log(KEY, 0, 4) == (b"", 0)
    ray.is_broken = True
    with pytest.raises(ClusterError, match="no agent"):
        drivers.log(KEY, 0, 4)


def test_a_driver_that_has_no_agent_yet_has_one_later(tmp_path: Path) -> None:
    ray = Ray(b"hello")
    ray.agent = ""
    drivers = ray.drivers(tmp_path)
    assert drivers.log(KEY, 0, 9) == (b"", 0)
    ray.agent = "http://agent:1"
    assert drivers.log(KEY, 0, 9) == (b"hello", 5)


def answers_in_memory() -> int:
    return sum(type(each) is httpx.Response for each in gc.get_objects())


def test_an_answer_that_was_read_waits_for_no_garbage_collection(tmp_path: Path) -> None:
    drivers = Ray(b"0123456789").drivers(tmp_path)
    gc.collect()
    gc.disable()
    try:
        before = answers_in_memory()
        drivers.log(KEY, 0, 4)
        assert answers_in_memory() == before
    finally:
        gc.enable()


def test_it_is_said_who_of_ray_does_not_answer(tmp_path: Path) -> None:
    def dead(request: httpx.Request) -> httpx.Response:
        if request.url.host == "ray":
            return httpx.Response(200, json={"driver_agent_http_address": "http://agent:1"})
        raise httpx.ConnectError("refused")

    drivers = RayJobs("http://ray", tmp_path, {})
    drivers._http = httpx.Client(base_url="http://ray", transport=httpx.MockTransport(dead))
    with pytest.raises(ClusterError, match="Ray does not answer at http://agent:1/: refused"):
        drivers.log(KEY, 0, 4)


def test_agents_of_long_ago_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytide.control.drivers.ray_jobs._AGENTS", 2)
    agents = httpx.MockTransport(lambda _: httpx.Response(200, json={"driver_agent_http_address": "http://agent:1"}))
    drivers = RayJobs("http://ray", tmp_path, {})
    drivers._http = httpx.Client(base_url="http://ray", transport=agents)
    for number in range(9):
        drivers.log(DriverKey(f"job-{number}", 0), 0, 4)
    assert 0 < len(drivers._agents) <= 2


def test_what_is_asked_of_ray_and_the_token_for_it_go_to_no_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Jobs(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Jobs) as server:
        server.timeout = 120.0
        thread = Thread(target=server.handle_request)
        thread.start()
        assert RayJobs(f"http://127.0.0.1:{server.server_port}", tmp_path, {"Authorization": "t"}).statuses() == {}
        thread.join()


@pytest.mark.parametrize(("epoch", "with_head"), [(1, False), (2, True)])
def test_a_driver_of_a_former_head_that_died_was_lost_with_that_head(
    tmp_path: Path, epoch: int, with_head: bool
) -> None:
    submitted: list[dict[str, object]] = []

    def ray(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            submitted.append(json.loads(request.content))
            return httpx.Response(200)
        return httpx.Response(200, json=[{**each, "status": "FAILED"} for each in submitted])

    for head in (1, epoch):
        drivers = RayJobs("http://ray", tmp_path, {}, head)
        drivers._http = httpx.Client(base_url="http://ray", transport=httpx.MockTransport(ray))
        if not submitted:
            drivers.start(KEY)
    status = drivers.statuses()[KEY]
    assert (status.state, status.with_head) == ("died", with_head)


def test_rays_job_service_is_made_to_watch_the_drivers_of_a_former_head(tmp_path: Path) -> None:
    submitted: list[bytes] = []
    state = "SUCCEEDED"

    def ray(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=[{"submission_id": "raytide-job-1-0", "status": state}])
        submitted.append(request.content)
        if len(submitted) == 1:
            return httpx.Response(500, text="No available agent to submit job")
        return httpx.Response(400, text="Job with submission_id raytide-job-1-0 already exists.")

    drivers = RayJobs("http://ray", tmp_path, {})
    drivers._http = httpx.Client(base_url="http://ray", transport=httpx.MockTransport(ray))
    assert drivers.statuses()[KEY].state == "succeeded"
    assert submitted == []
    state = "PENDING"
    with pytest.raises(ClusterError, match="No available agent"):
        drivers.statuses()
    assert [drivers.statuses()[KEY].state for _ in range(3)] == ["running"] * 3
    assert len(submitted) == 2
    assert b'"submission_id":"raytide-job-1-0"' in submitted[1].replace(b" ", b"")


def test_a_users_own_ray_jobs_are_no_drivers_whatever_their_ids(tmp_path: Path) -> None:
    """The controller would end them: no job of raytide wants them."""
    ids = ["raytide-bench-2", "raytide-job-1-\u00b2", "raytide-job-1-00", "raytide-job-x-1", "mine", None]
    listed = [{"submission_id": each, "status": "RUNNING"} for each in (*ids, "raytide-job-1-0")]
    drivers = RayJobs("http://ray", tmp_path, {})
    ray = httpx.MockTransport(lambda _: httpx.Response(200, json=listed))
    drivers._http = httpx.Client(base_url="http://ray", transport=ray)
    assert set(drivers.statuses()) == {KEY}


def test_a_driver_whose_gang_had_no_member_left_died_of_that() -> None:
    codes = {254: ("died", True), 255: ("died", False), 137: ("died", False), 3: ("failed", False)}
    for code, expected in codes.items():
        status = _status(KEY, {"status": "FAILED", "driver_exit_code": code, "message": "no member is usable"}, "0")
        assert (status.state, status.without_members) == expected


def test_an_attempt_that_ray_was_made_to_forget_keeps_its_output(tmp_path: Path) -> None:
    listed = [
        {"submission_id": "raytide-job-9-0", "status": "SUCCEEDED", "driver_agent_http_address": "http://former:1"},
        {"submission_id": "raytide-job-10-0", "status": "RUNNING", "driver_agent_http_address": "http://agent:1"},
        {"submission_id": "raytide-job-11-0", "status": "PENDING"},
        {"submission_id": "mine", "status": "RUNNING", "driver_agent_http_address": "http://elsewhere:1"},
    ]
    asked: list[tuple[str, str]] = []

    def ray(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        if request.url.host == "agent":
            return httpx.Response(206, headers={"Content-Range": "bytes 0-1/2"}, content=b"hi")
        is_known = request.url.path == "/api/jobs/"
        return httpx.Response(200, json=listed) if is_known else httpx.Response(404, text="does not exist")

    drivers = RayJobs("http://ray", tmp_path, {})
    drivers._http = httpx.Client(base_url="http://ray", transport=httpx.MockTransport(ray))
    drivers.forget(KEY)
    assert asked == [("DELETE", "/api/jobs/raytide-job-1-0")]
    assert drivers.log(KEY, 0, 4) == (b"hi", 2)
    assert asked[-1] == ("GET", "/logs/job-driver-raytide-job-1-0.log")
