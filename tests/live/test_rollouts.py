"""Rollouts on the session's cluster, under load: no challenger costs a user a request, and a good one is promoted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import raytide as rt
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.core.objects.endpoint import EndpointState
from raytide.core.specs.rollout import RolloutState

pytestmark = pytest.mark.cluster

THREADS = 4
STEPS = {
    "steps": [
        {"percent": 30, "for_s": 2, "requests": 15},
        {"percent": 60, "for_s": 2, "requests": 15},
        {"percent": 100, "for_s": 2, "requests": 15},
    ],
    "ready_within_s": 300,
}
GOAL_S = 3.0


class Load:
    """Users who ask one after the other, every second one for a stream."""

    def __init__(self, url: str, name: str) -> None:
        self.answered: Counter[str] = Counter()
        """The number of answers by their first word, which says whose they are."""
        self.failed: list[str] = []
        self._url, self._name = url, name
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(THREADS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(90)

    def _ask(self, thread: int) -> None:
        asked = 0
        with httpx.Client(timeout=60) as http:
            while not self._is_over.is_set():
                asked += 1
                body = {
                    "model": self._name,
                    "prompt": f"hello {thread} {asked}",
                    "max_tokens": 4,
                    "stream": asked % 2 == 0,
                }
                try:
                    answer = http.post(f"{self._url}/completions", json=body)
                    self.answered[_text(answer)] += 1
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.failed.append(repr(error))
                time.sleep(0.05)


def _text(answer: httpx.Response) -> str:
    """Returns the text of a whole or a streamed answer. Raises ValueError for a failed one."""
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code}: {answer.text}")
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json()["choices"][0]["text"])
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]" or any("error" in json.loads(event) for event in events[:-1]):
        raise ValueError(answer.text)
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.fixture
def serve(
    tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> Iterator[Callable[..., rt.EndpointHandle]]:
    """Serves fake engines; the endpoints are deleted at the end."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    made: set[str] = set()

    def make(name: str, *, canary: Any = False, **engine: object) -> rt.EndpointHandle:
        made.add(name)
        kind = {"kind": "fake", "tokens_per_s": 200.0, **engine}
        return tide.serve(model, name=name, cpus=1, slo_ttft_s=GOAL_S, engine=kind, canary=canary, replicas=(1, 2))

    yield make
    for name in made:
        tide.endpoint(name).delete()
    eventually(lambda: all(_is_deleted(tide, name) for name in made), within_s=120.0)


def _is_deleted(tide: rt.Client, name: str) -> bool:
    return tide.endpoint(name).status.endpoint.state is EndpointState.DELETED


def _state(handle: rt.EndpointHandle) -> RolloutState:
    status = handle.rollout()
    assert status is not None
    return status.rollout.state


@pytest.mark.parametrize(
    ("broken", "because"),
    [
        pytest.param({"fail_on": "hello"}, "failed requests", id="fails"),
        pytest.param({"tokens_per_s": 0.25}, "late first tokens", id="slow", marks=pytest.mark.soak),
        pytest.param({"die_on": "hello"}, "failed requests", id="dies", marks=pytest.mark.soak),
        pytest.param({"kind": "native"}, "the challenger", id="never-ready", marks=pytest.mark.soak),
    ],
)
def test_a_broken_challenger_is_rolled_back_and_costs_no_user_a_request(
    tide: rt.Client,
    serve: Callable[..., rt.EndpointHandle],
    eventually: Callable[..., None],
    broken: dict[str, object],
    because: str,
) -> None:
    name = f"web-{because.split()[0]}-{len(str(broken))}"
    handle = serve(name, reply="old ").wait(timeout_s=360.0)
    with Load(handle.base_url, name) as load:
        eventually(lambda: load.answered["old "] > 20, within_s=60.0)
        steps = {**STEPS, "ready_within_s": 20} if broken.get("kind") == "native" else STEPS
        serve(name, canary=steps, **{"reply": "new ", **broken})
        eventually(lambda: _state(handle) not in (RolloutState.STARTING,), within_s=90.0)
        eventually(lambda: _state(handle) is RolloutState.ROLLED_BACK, within_s=60.0)
        status = handle.rollout()
        assert status is not None
        assert because in status.rollout.reason
        before = load.answered["old "]
        eventually(lambda: load.answered["old "] > before + 20, within_s=60.0)
        eventually(lambda: all(each.endpoint.name != f"{name}~2" for each in tide.client.endpoints()), within_s=120.0)
    assert load.failed == []
    assert tide.endpoint(name).status.revision == 1


@pytest.mark.soak  # a how-to rolls one out in steps, without kills
def test_a_good_challenger_is_promoted_in_steps_by_controllers_that_are_killed(
    live: LocalCluster, tide: rt.Client, serve: Callable[..., rt.EndpointHandle], eventually: Callable[..., None]
) -> None:
    handle = serve("good", reply="old ").wait(timeout_s=360.0)
    with Load(handle.base_url, "good") as load:
        eventually(lambda: load.answered["old "] > 20, within_s=60.0)
        serve("good", canary=STEPS, reply="new ")
        kill_controller(live, eventually)
        eventually(lambda: load.answered["new "] > 5, within_s=120.0)
        kill_controller(live, eventually)
        eventually(lambda: _state(handle) is RolloutState.PROMOTED, within_s=120.0)
        kill_controller(live, eventually)
        old = load.answered["old "]
        eventually(lambda: tide.endpoint("good").status.revision == 2, within_s=30.0)
        new = load.answered["new "]
        eventually(lambda: load.answered["new "] > new + 20, within_s=60.0)
        eventually(lambda: len(_applications(tide)) == 1, within_s=120.0)
        status = handle.rollout()
        assert status is not None
        eventually(lambda: handle.rollout().rollout.ended_at_s is not None, within_s=30.0)  # type: ignore[union-attr]
        assert load.answered["old "] <= old + 2 * THREADS, "what had begun"
    assert load.failed == []
    assert set(load.answered) == {"old ", "new "}
    audited = {entry.action for entry in tide.client.audit(object="good")}
    assert {"rollout.start", "rollout.running", "rollout.promoted"} <= audited
    assert [each.number for each in tide.client.revisions("good")] == [2, 1]


def _applications(tide: rt.Client) -> list[str]:
    statuses = tide.client.endpoints()
    return [s.endpoint.name for s in statuses if s.endpoint.name.startswith("good") and not s.endpoint.ended_at_s]


def kill_controller(live: LocalCluster, eventually: Callable[..., None]) -> None:
    before = live.process("controller")
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: live.process("controller") not in (None, before), within_s=60.0)
