"""The client of an API that dies and comes back: what changes something is not lost, and is done once."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, RemoteDisconnected
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from raytide.control.api.gate import BODY_BYTES
from raytide.control.client import ApiClient, HttpConnections
from raytide.control.client import api_client as module
from raytide.control.views import JobView, to_json
from raytide.core.errors import ClusterError, ConfigError, NotFoundError, StorageError
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.sdk.jobs import job_run
from raytide.sdk.jobs.job_run import Run

SPEC = JobSpec(kind=JobKind.GANG, name="g", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))


class Request(NamedTuple):
    method: str
    path: str
    query: Mapping[str, Any]
    body: Any


class Api:
    """Dies under so many requests, some of them read already; then it answers with a status and a value."""

    def __init__(self, deaths: int, answer: Callable[[Request], tuple[int, object]]) -> None:
        self.deaths, self.answer = deaths, answer
        self.seen: list[Request] = []

    def request(
        self, method: str, path: str, query: Mapping[str, Any], body: object, *, timeout_s: float
    ) -> tuple[int, bytes]:
        self.seen.append(Request(method, path, query, body))
        if len(self.seen) <= self.deaths:
            raise (ConnectionRefusedError, RemoteDisconnected)[len(self.seen) % 2]("gone")
        status, value = self.answer(self.seen[-1])
        return status, json.dumps(value).encode()


class VirtualTime:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def virtual(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    monkeypatch.setattr(module, "time", time := VirtualTime())
    return time


def connected(api: Api) -> ApiClient:
    client = ApiClient("http://api", "token")
    client._http = api  # type: ignore[assignment]
    return client


def test_a_lease_is_given_back_although_the_api_is_being_restarted() -> None:
    api = Api(3, lambda request: (200, {}))
    connected(api).release("job-1")
    assert len(api.seen) == 4


def test_what_a_driver_reports_is_sent_although_its_text_is_no_utf_8() -> None:
    api = Api(0, lambda request: (200, {}))
    connected(api).report("job-1", {"error": "no file a\udcff\0b", "step": 3})
    connected(api).release("job-1", error="\ud800")
    assert [request.body for request in api.seen] == [
        {"error": "no file a?b", "step": 3},
        {"error": "?"},
    ]


def test_a_loss_that_is_not_finite_is_reported_and_does_not_end_the_script() -> None:
    """The alert LossNaN waits for it. The store keeps it as a text as well."""
    api = Api(0, lambda request: (200, {}))
    connected(api).report("job-1", {"loss": math.nan, "low": -math.inf, "step": 3, "lr": 0.1})
    assert api.seen[0].body == {"loss": "nan", "low": "-inf", "step": 3, "lr": 0.1}


def test_a_lease_is_given_back_although_the_error_is_longer_than_a_body_may_be() -> None:
    api = Api(0, lambda request: (200, {}))
    connected(api).release("job-1", error="RayTaskError: " + "\u6f6e" * 100_000)
    connected(api).report("job-1", {"note": "x" * 100_000})
    assert api.seen[0].body["error"].startswith("RayTaskError: ")
    assert all(len(json.dumps(request.body)) < BODY_BYTES for request in api.seen)


def test_a_submission_that_met_a_dying_api_is_repeated_under_one_key() -> None:
    def missing(request: Request) -> tuple[int, object]:
        return 404, {"error": NotFoundError("no such thing").to_json()}

    api = Api(2, missing)
    with pytest.raises(NotFoundError):  # the API's word is final, and ends the repeating
        connected(api).submit(SPEC)
    keys = [request.query["key"] for request in api.seen]
    assert len(keys) == 3
    assert len(set(keys)) == 1


@pytest.mark.parametrize(
    ("ask", "patience_s"), [(lambda client: client.status(), 1.5), (lambda client: client.stop("job-1"), 10.0)]
)
def test_an_api_that_stays_away_is_given_up(
    virtual: VirtualTime, ask: Callable[[ApiClient], object], patience_s: float
) -> None:
    with pytest.raises(ClusterError, match="the API at http://api does not answer: gone"):
        ask(connected(Api(999, lambda request: (200, {}))))
    assert patience_s <= virtual.now_s < patience_s + 0.5


def test_a_state_that_is_away_for_a_while_ends_no_watcher(
    virtual: VirtualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = to_json(JobView(Job("job-1", SPEC, "ana", JobState.SUCCEEDED, 0.0), None, 0, 0))
    away = (507, {"error": StorageError("the state cannot be read.").to_json()})
    api = Api(0, lambda request: away if virtual.now_s < 5.0 else (200, done))
    monkeypatch.setattr(job_run, "time", virtual)
    run = Run(connected(api), JobView(Job("job-1", SPEC, "ana", JobState.RUNNING, 0.0), None, 0, 0))
    assert run.wait().state is JobState.SUCCEEDED
    assert virtual.now_s >= 5.0


def test_a_log_is_asked_for_part_by_part() -> None:
    def answer(request: Request) -> tuple[int, object]:
        at = int(request.query.get("after") or 1)
        tail = request.query.get("tail")
        at = at if tail is None else 10 - int(tail)
        return 200, {"text": "0123456789"[at : at + 4], "after": str(at + 4), "has_more": at < 6}

    run = Run(connected(Api(0, answer)), JobView(Job("job-1", SPEC, "ana", JobState.RUNNING, 0.0), None, 0, 0))
    assert run.logs() == "123456789"
    assert run.logs(tail=6) == "456789"


def test_a_job_is_shown_although_its_step_is_a_text() -> None:
    job = Job("job-1", SPEC, "ana", JobState.RUNNING, 0.0, progress={"step": "warm-up", "loss": "nan"})
    shown = Run(connected(Api(0, lambda request: (200, {}))), JobView(job, None, 0, 0)).glance()
    assert (shown.done, shown.facts["step"]) == (0.0, "warm-up")


def test_a_team_is_sent_only_where_one_was_named() -> None:
    """Else it is the token's, which the API knows."""
    view = to_json(JobView(Job("job-1", SPEC, "ana", JobState.QUEUED, 0.0), None, 0, 0))
    api = Api(0, lambda request: (200, view))
    connected(api).submit(SPEC)
    connected(api).submit(SPEC.model_copy(update={"team": "red"}))
    assert [request.body.get("team") for request in api.seen] == [None, "red"]


class Echo(ThreadingHTTPServer):
    """Answers with what it was asked, and counts its connections."""

    daemon_threads = True
    connections = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)


class EchoHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Echo

    def do_PUT(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/api/too-large":
            self._answer(413, {}, ends=True)  # before the body is read
            return
        if url.path == "/api/away":  # as a proxy says it
            self._answer(503, "no error of the API")
            return
        if url.path == "/api/no-store":
            self._answer(503, {"error": {"code": "storage"}})
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        names = ("Authorization", "Content-Type")
        self._answer(
            200, {"path": url.path, "query": parse_qs(url.query), "body": body, **{n: self.headers[n] for n in names}}
        )
        self.close_connection = url.path == "/api/closes"  # without saying so

    do_GET = do_PUT

    def _answer(self, status: int, value: object, *, ends: bool = False) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if ends:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo(("127.0.0.1", 0), EchoHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture
def http(echo: Echo) -> Iterator[HttpConnections]:
    found = HttpConnections(f"http://127.0.0.1:{echo.server_port}/api/", {"Authorization": "Bearer t"})
    yield found
    found.close()


def asked(http: HttpConnections, path: str, query: Mapping[str, Any] | None = None, body: object = None) -> Any:
    status, answer = http.request("PUT", path, query or {}, body, timeout_s=10.0)
    assert status == 200
    return json.loads(answer)


def test_a_request_arrives_as_it_was_given(http: HttpConnections) -> None:
    given = asked(http, "/v1/a ?b/é", {"active": True, "after": "0:7", "name": "é&"}, {"loss": 0.5, "é": None})
    assert given["path"] == "/api/v1/a%20%3Fb/%C3%A9"
    assert given["query"] == {"active": ["true"], "after": ["0:7"], "name": ["é&"]}
    assert (json.loads(given["body"]), given["Content-Type"]) == ({"loss": 0.5, "é": None}, "application/json")
    assert given["Authorization"] == "Bearer t"
    package = asked(http, "/v1/packages/x", body=b"zip")
    assert (package["body"], package["Content-Type"]) == ("zip", None)
    nothing = asked(http, "/v1/jobs")
    assert (nothing["body"], nothing["Content-Type"]) == ("", None)


def test_requests_share_a_connection_and_threads_do_not(http: HttpConnections, echo: Echo) -> None:
    for number in range(5):
        asked(http, f"/{number}")
    assert echo.connections == 1
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: asked(http, f"/{number}")["path"], range(200)))
    assert answers == [f"/api/{number}" for number in range(200)]
    assert echo.connections <= 8


def test_a_connection_that_the_server_closed_meanwhile_is_replaced(http: HttpConnections, echo: Echo) -> None:
    for _ in range(3):
        asked(http, "/closes")
    assert echo.connections == 3


def test_an_answer_that_precedes_the_end_of_the_request_is_read(http: HttpConnections) -> None:
    assert http.request("PUT", "/too-large", {}, b"x" * (8 << 20), timeout_s=10.0)[0] == 413
    assert asked(http, "/next")["path"] == "/api/next"


def test_a_proxy_whose_server_is_away_is_no_answer(http: HttpConnections) -> None:
    with pytest.raises(HTTPException, match="a proxy answered 503"):
        http.request("GET", "/away", {}, None, timeout_s=10.0)
    assert http.request("GET", "/no-store", {}, None, timeout_s=10.0)[0] == 503  # the API's own word


def test_an_address_without_a_scheme_or_host_is_an_error_that_names_it() -> None:
    for address in ("localhost:7400", "http://", "ftp://api"):
        with pytest.raises(ConfigError, match="is not the address of an API"):
            ApiClient(address, "token")


def test_a_token_that_no_header_can_hold_is_an_error() -> None:
    for token in ("secret\n", "gehëim"):
        with pytest.raises(ConfigError, match="RAYTIDE_TOKEN"):
            ApiClient("http://api", token)


def test_a_forked_process_opens_a_connection_of_its_own(
    http: HttpConnections, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(http, "/parent")
    with monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        assert asked(http, "/child")["path"] == "/api/child"
        assert echo.connections == 2
    asked(http, "/parent")
    assert echo.connections == 2, "the parent goes on with its own"


def test_fields_that_a_later_release_has_added_end_no_gang_and_hide_no_job() -> None:
    """Drivers, gateways and SDKs outlive an upgrade of the API: `inputs` of a Shape came while gangs ran."""
    lease = to_json(Lease("lease-1", "job-1", SPEC.gang.shapes[0], LeaseState.ACTIVE, ()))
    lease["shape"]["from_the_future"] = lease["from_the_future"] = 1
    seen = connected(Api(0, lambda request: (200, lease))).lease("job-1")
    assert (seen.id, seen.shape) == ("lease-1", SPEC.gang.shapes[0])
    view = to_json(JobView(Job("job-1", SPEC, "me", JobState.QUEUED, 0.0), None, 0, 0))
    view["job"]["spec"]["from_the_future"] = view["job"]["spec"]["gang"]["from_the_future"] = {"a": 1}
    assert connected(Api(0, lambda request: (200, view))).job("job-1").job.spec == SPEC
