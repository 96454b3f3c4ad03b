"""Answers and bills on the session's cluster: copies, splits, a hosted API, and bills while processes die."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.cluster_fixture import HOSTED_KEY, hosted_url, replica_pids, through_both_gateways

import raytide as rt
from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
from raytide.control.bootstrap.cluster_record import LocalCluster
from raytide.control.views import RolloutStatus
from raytide.core.objects.api_key import ApiKey, KeyBudget, KeySpec, TokenPrice, UsageRow
from raytide.core.objects.endpoint import EndpointState
from raytide.core.specs.rollout import RolloutState
from raytide.registry.rollout.traffic import TrafficSplit

pytestmark = pytest.mark.cluster

PRICE = TokenPrice(prompt=3.0, cached=0.5, completion=7.0)
HOSTED_PRICE = TokenPrice(prompt=11.0, completion=13.0)


class User:
    """The holder of a key, who notes what every answer used and sends what fails on its way once more."""

    def __init__(self, tide: rt.Client, base_url: str, name: str) -> None:
        made = tide.client.create_key(KeySpec(name=name, team="default", budget=KeyBudget(usd=5.0)))
        self.key: ApiKey = made.key
        self._tide, self._url = tide, base_url
        self.headers = {"authorization": f"Bearer {made.secret}"}
        self.usages: dict[str, dict[str, int]] = {}
        """The usage of each whole answer, by the id of its row."""
        self.broken = 0
        """The requests whose connection broke."""
        deadline = time.monotonic() + 180.0
        while not through_both_gateways(lambda: is_listed(self._url, self.headers)):
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def ask(self, model: str, prompt: str, **more: object) -> httpx.Response:
        """Sends a request through a connection of its own, so through any of the gateway's processes."""
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        deadline = time.monotonic() + 360.0
        while True:
            try:
                answer = httpx.post(f"{self._url}/completions", json=body, headers=self.headers, timeout=180.0)
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
                self.broken += 1
                time.sleep(0.2)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        self.usages[found["id"].rpartition("-")[2]] = found["usage"]
        return answer

    def rows(self) -> list[UsageRow]:
        return list(self._tide.client.usage(key=self.key.id, limit=1000).rows)

    def check_bill(self, eventually: Callable[..., None], price: Callable[[UsageRow], TokenPrice]) -> None:
        """Each answer has one row with its tokens; only broken requests may have further ones; the sum is the key's."""
        rows: list[UsageRow] = []

        def are_settled() -> bool:
            """Returns whether all that was asked is booked: a gateway that was killed reports in its next life."""
            nonlocal rows
            rows, spent = self.rows(), self._spent()
            groups = self._tide.client.usage_sums("key", key=self.key.id)
            sums = [(group.requests, group.cost_micro_usd) for group in groups]
            billed = sum(row.cost_micro_usd for row in rows)
            return self.usages.keys() <= {row.id for row in rows} and spent == billed and sums == [(len(rows), billed)]

        eventually(are_settled, within_s=60.0)
        by_id = {row.id: row for row in rows}
        assert len(by_id) == len(rows), "a request has two rows"
        for id, usage in self.usages.items():
            got = (by_id[id].prompt_tokens, by_id[id].completion_tokens, by_id[id].status)
            assert got == (usage["prompt_tokens"], usage["completion_tokens"], 200)
        assert len(rows) - len(self.usages) <= self.broken
        pico = sum(
            price(row).cost_pico_usd(row.prompt_tokens, row.cached_tokens, row.completion_tokens) for row in rows
        )
        assert sum(row.cost_micro_usd for row in rows) == (pico + 500_000) // 1_000_000

    def _spent(self) -> int:
        return self._tide.client.key(self.key.id).spending.life


def is_listed(base_url: str, headers: dict[str, str] | None = None) -> bool:
    """Returns whether the gateway answers, knows the endpoint of this address and the key of these headers."""
    try:
        return httpx.get(f"{base_url}/models", headers=headers, timeout=60.0).is_success
    except httpx.TransportError:
        return False


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture
def served(
    tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> Iterator[Callable[..., rt.EndpointHandle]]:
    """Serves fake engines at a price; the endpoints are deleted at the end."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    made: set[str] = set()

    def serve(name: str, *, replicas: tuple[int, int] = (1, 1), engine: Any = None, **more: Any) -> rt.EndpointHandle:
        made.add(name)
        kind = {"kind": "fake", "reply": "near ", **(engine or {})}
        priced = {"price": PRICE, **({} if "gpus" in more else {"cpus": 1}), **more}
        return tide.serve(model, name=name, engine=kind, replicas=replicas, **priced)

    yield serve
    for name in made:
        tide.endpoint(name).delete()
    deleted = EndpointState.DELETED
    eventually(lambda: all(tide.endpoint(name).status.endpoint.state is deleted for name in made), within_s=120.0)


def running(handle: rt.EndpointHandle) -> RolloutStatus | None:
    status = handle.rollout()
    return status if status is not None and status.rollout.state is RolloutState.RUNNING else None


def kill(live: LocalCluster, what: str) -> None:
    process = live.process(what)
    assert process is not None
    process.send(signal.SIGKILL)


def test_copies_reach_no_user_and_cost_none(
    tide: rt.Client, served: Callable[..., rt.EndpointHandle], eventually: Callable[..., None]
) -> None:
    handle = served("copied").wait(timeout_s=360.0)
    user = User(tide, handle.base_url, "copied")
    served("copied", engine={"reply": "nearer "}, shadow=100.0)
    eventually(lambda: running(handle), within_s=90.0)
    count = 0

    def are_copied() -> bool:
        nonlocal count  # gateways copy from when they know of the challenger's replica
        count += 1
        assert text_of(user.ask("copied", f"question {count}")) == "near nea"
        status = running(handle)
        assert status is not None
        return status.challenger.counts.compared >= 10

    eventually(are_copied, within_s=60.0)
    status = running(handle)
    assert status is not None
    assert status.challenger.counts.equal == 0
    assert status.challenger.counts.errors == 0
    user.check_bill(eventually, lambda _: PRICE)
    assert {row.version for row in user.rows()} == {"r1"}
    assert len(user.rows()) == count, "no copy has a row"


@pytest.mark.soak
def test_users_stay_with_their_side_of_a_split_and_their_own_metric_decides(
    live: LocalCluster,
    tide: rt.Client,
    served: Callable[..., rt.EndpointHandle],
    eventually: Callable[..., None],
) -> None:
    handle = served("split").wait(timeout_s=360.0)
    user = User(tide, handle.base_url, "split")
    served("split", engine={"reply": "nearer "}, ab={"metric": "words", "test": {"effect": 1.0, "requests": 60}})
    eventually(lambda: running(handle), within_s=90.0)
    split = TrafficSplit(endpoint="split", champion=1, challenger=2, percent=50.0)
    expected = {f"user-{n}": split.revision_of(f"{user.key.account}/user-{n}") for n in range(60)}
    assert set(expected.values()) == {1, 2}

    def seen() -> dict[str, int]:
        """Returns the revision that answered each user, and checks that the text is that one's."""
        found = {}
        for name in expected:
            answer = user.ask("split", "hi", user=name)
            found[name] = int(answer.headers["x-raytide-revision"])
            assert text_of(answer) == ("near nea" if found[name] == 1 else "nearer n")
            words[answer.json()["id"]] = 3.0 * found[name] + len(words) % 2
        return found

    words: dict[str, float] = {}

    eventually(lambda: seen() == expected, within_s=60.0)
    assert [seen() for _ in range(2)] == [expected] * 2, "through connections to both gateway processes"
    kill(live, "gateway-0")
    kill(live, "gateway-1")
    eventually(lambda: seen() == expected, within_s=60.0)
    assert seen() == expected, "new processes, the same users"
    unnamed = {user.ask("split", f"question {n}").headers["x-raytide-revision"] for n in range(10)}
    assert len(unnamed) == 1, "requests of one key that name no user stay together"
    user.check_bill(eventually, lambda _: PRICE)
    secret = user.headers["authorization"].removeprefix("Bearer ")
    for id, value in words.items():
        handle.feedback(id, words=value, api_key=secret)
    eventually(lambda: "the challenger's words is better" in _reason(handle), within_s=60.0)
    handle.stop_rollout("seen enough")


def _reason(handle: rt.EndpointHandle) -> str:
    status = handle.rollout()
    return "" if status is None else status.rollout.reason


@contextmanager
def hosted_server(bound: socket.socket) -> Iterator[Counter[str]]:
    """A hosted API behind a real socket; yields the number of requests by the key that they had."""
    import uvicorn

    asked: Counter[str] = Counter()
    app = create_app(Server(FakeEngine(reply="far "), model="big"))

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked[dict(scope["headers"]).get(b"authorization", b"").decode()] += 1
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(counted, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound.dup()]})
    thread.start()
    try:
        yield asked
    finally:
        server.should_exit = True
        thread.join(60)


def test_a_hosted_api_answers_while_no_replica_does_at_its_own_price(
    live: LocalCluster,
    tide: rt.Client,
    served: Callable[..., rt.EndpointHandle],
    eventually: Callable[..., None],
    hosted_socket: socket.socket,
) -> None:
    fallback = {"base_url": hosted_url(hosted_socket), "model": "big", "price": HOSTED_PRICE, "max_tokens": 50}
    with hosted_server(hosted_socket) as asked:
        user = User(tide, f"{live.serve_url}/v1", "near")  # before: its first request is to find no replica
        handle = served("near", replicas=(0, 1), fallback=fallback)
        eventually(lambda: through_both_gateways(lambda: is_listed(handle.base_url, user.headers)), every_s=0.05)
        first = user.ask("near", "hi")
        assert (text_of(first), first.headers["x-raytide-replica"]) == ("far far ", "hosted")
        is_near = partial(through_both_gateways, lambda: text_of(user.ask("near", "hi")) == "near nea")
        eventually(is_near, within_s=90.0)  # each learns of the replica by itself
        before = asked.total()
        assert text_of(user.ask("near", "hi")) == "near nea"
        assert asked.total() == before, "a replica that answers costs nothing elsewhere"

        def falls_back() -> bool:
            for pid in replica_pids(live):  # the next one may be there before anybody asks
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return text_of(user.ask("near", "hi")) == "far far "

        eventually(falls_back, within_s=60.0)
        eventually(is_near, within_s=90.0)
        user.check_bill(eventually, lambda row: HOSTED_PRICE if row.version == "hosted:big" else PRICE)
        assert asked == {f"Bearer {HOSTED_KEY['EXAMPLE_HOSTED_KEY']}": asked.total()}
        assert sum(row.version == "hosted:big" for row in user.rows()) == asked.total()


@pytest.mark.parametrize(
    ("streams", "kills"), [(16, 2), pytest.param(32, 12, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_nothing_is_billed_twice_while_replicas_and_a_gateway_are_killed(
    live: LocalCluster,
    tide: rt.Client,
    served: Callable[..., rt.EndpointHandle],
    eventually: Callable[..., None],
    streams: int,
    kills: int,
) -> None:
    name = f"billed-{streams}"
    handle = served(name, replicas=(2, 2), engine={"tokens_per_s": 40.0}).wait(replicas=2, timeout_s=360.0)
    user, is_over, moments = User(tide, handle.base_url, name), threading.Event(), random.Random(0)

    def keep_asking(number: int) -> int:
        asked = 0
        while not is_over.is_set():
            asked += 1
            answer = user.ask(name, f"{number} {asked}", max_tokens=60)
            assert text_of(answer) == "near " * 12, "a pause, and not an error"
        return asked

    with ThreadPoolExecutor(streams) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(streams)]
        try:
            eventually(lambda: len(user.usages) >= streams, within_s=60.0)
            for number in range(kills):
                time.sleep(moments.uniform(0.3, 1.5))
                if number % 2:
                    kill(live, f"gateway-{number // 2 % 2}")
                else:
                    eventually(lambda: len(replica_pids(live)) == 2, within_s=90.0)
                    os.kill(moments.choice(replica_pids(live)), signal.SIGKILL)
            done = len(user.usages)
            eventually(lambda: len(user.usages) >= done + 2 * streams, within_s=60.0)
        finally:
            is_over.set()
        asked = sum(future.result(timeout=360.0) for future in asking)
    assert asked == len(user.usages)
    assert user.broken > 0, "no connection of the killed gateway was seen to break"
    user.check_bill(eventually, lambda _: PRICE)


@pytest.mark.soak
def test_two_models_share_a_gpu_each_by_its_name(
    live: LocalCluster,
    tide: rt.Client,
    served: Callable[..., rt.EndpointHandle],
    eventually: Callable[..., None],
) -> None:
    handles = [served(name, gpus=0.5, engine={"reply": f"{name} "}) for name in ("left", "right")]
    for handle in handles:
        handle.wait(timeout_s=360.0)
    address = handles[0].base_url.replace("/left/", "/")
    user = User(tide, address, "shares")
    assert [text_of(user.ask(name, "hi", max_tokens=4)) for name in ("left", "right")] == ["left", "righ"]
    gpus = set()
    for pid in replica_pids(live):
        (engine,) = (each for each in psutil.Process(pid).children() if "engine_process" in " ".join(each.cmdline()))
        gpus.add(engine.environ()["CUDA_VISIBLE_DEVICES"])
    assert len(gpus) == 1, "one GPU for both"
    metrics = httpx.get(f"{address.removesuffix('/v1')}/metrics", headers=user.headers, timeout=60.0).text
    for name in ("left", "right"):
        assert f'endpoint="{name}"' in metrics
    user.check_bill(eventually, lambda _: PRICE)
