"""The output of replicas whose node does not answer at first is asked for again, and warned of if it stays away."""

from __future__ import annotations

from typing import Any, cast

import pytest

from raytide.control.client import ApiClient
from raytide.control.views import EndpointLogPart, EndpointStatus, LogLine, to_json
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.sdk.serving import endpoint as module
from raytide.sdk.serving.endpoint import EndpointHandle

PRESENT, LATE = LogLine("r1", "1", "here"), LogLine("r2", "2", "late")


class Api:
    """Answers with the output of one replica at once, and with that of the other after some questions."""

    def __init__(self, silent_for: int) -> None:
        self.silent_for, self.asked = silent_for, list[dict[str, Any]]()

    def call(self, method: str, path: str, body: object, query: dict[str, Any]) -> object:
        self.asked.append(query)
        lines = [] if "after" in query else [PRESENT]
        if len(self.asked) <= self.silent_for:
            return to_json(EndpointLogPart(lines, "r1.0:5", has_more=False, missing=("r2",)))
        return to_json(EndpointLogPart([*lines, LATE], "r1.0:5,r2.0:5", has_more=False))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WATCH_S", 0.0)


def handle(api: object) -> EndpointHandle:
    spec = ServeSpec(name="chat", model="m")
    endpoint = Endpoint(spec, "ann", EndpointState.RUNNING, created_at_s=0.0, target_replicas=2)
    return EndpointHandle(cast("ApiClient", api), EndpointStatus(endpoint, "http://x/chat/v1", 2, 0.0, 0))


def test_a_node_that_answers_late_is_asked_again_and_no_line_comes_twice() -> None:
    api = Api(silent_for=2)
    assert list(handle(api).logs(tail=10)) == ["r1 here", "r2 late"]
    assert [query.get("tail") for query in api.asked] == [10, 10, 10], "of the late one too only the last lines"


def test_a_node_that_never_answers_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert list(handle(Api(silent_for=99)).logs()) == ["r1 here"]
    assert "The output of r2 is missing" in caplog.text


def test_a_gone_node_is_warned_of_once_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    why = "node node-3 is gone (taken back)"

    class Api:
        asked = 0

        def call(self, *request: object) -> object:
            self.asked += 1
            gone = dict.fromkeys(("r2", "r3"), why)
            return to_json(EndpointLogPart([PRESENT], "", has_more=self.asked == 1, gone=gone))

    api = Api()
    assert list(handle(api).logs()) == ["r1 here"] * 2
    assert caplog.messages == [f"The output of r2, r3 is missing: {why}."]
    assert api.asked == 2, "nobody waits for it"
