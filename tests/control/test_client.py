"""The client of an API that dies and comes back: what changes something is not lost, and is done once."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from raytide.control import client as module
from raytide.control.client import ApiClient
from raytide.control.views import JobView, to_json
from raytide.core.errors import ClusterError, NotFoundError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.sdk.job_run import Run

SPEC = JobSpec(kind=JobKind.GANG, name="g", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))


class Api:
    """Dies under so many requests, some of them read already; then it answers."""

    def __init__(self, deaths: int, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.deaths, self.answer = deaths, answer
        self.seen: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        if len(self.seen) <= self.deaths:
            raise (httpx.ConnectError, httpx.ReadError)[len(self.seen) % 2]("gone")
        return self.answer(request)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)


def connected(api: Api) -> ApiClient:
    client = ApiClient("http://api", "token")
    client._http = httpx.Client(base_url="http://api", transport=httpx.MockTransport(api))
    return client


def test_a_lease_is_given_back_although_the_api_is_being_restarted() -> None:
    api = Api(3, lambda request: httpx.Response(200, json={}))
    connected(api).release("job-1")
    assert len(api.seen) == 4


def test_what_a_driver_reports_is_sent_although_its_text_is_no_utf_8() -> None:
    api = Api(0, lambda request: httpx.Response(200, json={}))
    connected(api).report("job-1", {"error": "no file a\udcff\0b", "step": 3})
    connected(api).release("job-1", error="\ud800")
    assert [json.loads(request.content) for request in api.seen] == [
        {"error": "no file a?b", "step": 3},
        {"error": "?"},
    ]


def test_a_submission_that_met_a_dying_api_is_repeated_under_one_key() -> None:
    def missing(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, json={"error": NotFoundError("no such thing").to_json()})

    api = Api(2, missing)
    with pytest.raises(NotFoundError):  # the API's word is final, and ends the repeating
        connected(api).submit(SPEC)
    keys = [request.url.params["key"] for request in api.seen]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_a_question_to_an_api_that_is_gone_is_answered_at_once() -> None:
    api = Api(99, lambda request: httpx.Response(200, json={}))
    with pytest.raises(ClusterError, match="does not answer"):
        connected(api).status()
    assert len(api.seen) == 1


def test_a_change_is_given_up_when_the_api_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AWAY_S", 0.0)
    with pytest.raises(ClusterError, match="does not answer"):
        connected(Api(99, lambda request: httpx.Response(200, json={}))).stop("job-1")


def test_a_log_is_asked_for_part_by_part() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        at = int(request.url.params.get("after") or 1)
        tail = request.url.params.get("tail")
        at = at if tail is None else 10 - int(tail)
        return httpx.Response(200, json={"text": "0123456789"[at : at + 4], "after": str(at + 4), "has_more": at < 6})

    run = Run(connected(Api(0, answer)), JobView(Job("job-1", SPEC, "ana", JobState.RUNNING, 0.0), None, 0, 0))
    assert run.logs() == "123456789"
    assert run.logs(tail=6) == "456789"


def test_a_team_is_sent_only_where_one_was_named() -> None:
    """Else it is the token's, which the API knows."""
    view = to_json(JobView(Job("job-1", SPEC, "ana", JobState.QUEUED, 0.0), None, 0, 0))
    api = Api(0, lambda request: httpx.Response(200, json=view))
    connected(api).submit(SPEC)
    connected(api).submit(SPEC.model_copy(update={"team": "red"}))
    assert [json.loads(request.content).get("team") for request in api.seen] == [None, "red"]
