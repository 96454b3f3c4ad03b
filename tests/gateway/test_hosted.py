"""A hosted API as an endpoint's engine and as its fallback; raytide's own server is the hosted API."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from tests.actors.serving.asgi import ask
from tests.gateway.conftest import Gateway, running_gateway, until
from tests.gateway.tenancy.conftest import Line, line, secret_of, store  # noqa: F401
from tests.virtual_loop import run_virtually

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
from raytide.core.objects.cluster_config import HostedApi
from raytide.core.state import Store
from raytide.core.state.tenancy.usage import UsageFilter
from raytide.gateway import hosted as hosted_apis
from raytide.gateway.hosted import HostedApis, UsageReader, _RelayedStream

URL, KEY = "http://hosted.example/v1", "sk-very-secret"
BACKEND = {"base_url": URL, "model": "big", "price": {"prompt": 3.0, "completion": 7.0}, "max_tokens": 50}
HOSTED: dict[str, Any] = {"model": "hosted", "replicas": {"min": 0}, "backend": BACKEND}


class Hosted(httpx.AsyncBaseTransport):
    """The hosted API. `status` other than 200 answers in its place."""

    def __init__(self, app: Any) -> None:
        self._app = httpx.ASGITransport(app)
        self.status = 200
        self.requests: list[httpx.Request] = []
        self.error: Exception | None = None
        self.takes_s = 0.0
        """The seconds that it needs for an answer; the test does not wait for them."""
        self.is_silent = False
        self.left = 0
        """The requests that were given up while it was silent."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.is_silent:
            try:
                await asyncio.Event().wait()
            finally:
                self.left += 1
        if self.takes_s > request.extensions["timeout"]["read"]:
            raise httpx.ReadTimeout("no byte came")
        if self.error is not None:
            raise self.error
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": f"no, {KEY}", "param": "x"}})
        return await self._app.handle_async_request(request)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]


@asynccontextmanager
async def hosted_gateway(**options: Any) -> AsyncIterator[tuple[Gateway, Hosted]]:
    server = Server(FakeEngine(reply="far "), model="big")
    await server.start()
    hosted = Hosted(create_app(server, owns_server=False))
    async with running_gateway(hosted=HostedApis({URL: KEY}, hosted), **options) as gateway:
        yield gateway, hosted
    await server.stop()


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **more}


@pytest.mark.asyncio
async def test_a_hosted_api_answers_in_place_of_replicas() -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", **HOSTED)
        answer = await gateway.http.post("/v1/chat/completions", json=chat("chat", priority=0))
        assert answer.json()["model"] == "chat"
        assert answer.json()["choices"][0]["message"]["content"] == "far f"
        assert answer.headers["x-raytide-replica"] == "hosted"
        (request,), (body,) = hosted.requests, hosted.bodies()
        assert (str(request.url), request.headers["authorization"]) == (f"{URL}/chat/completions", f"Bearer {KEY}")
        assert (body["model"], body["max_completion_tokens"]) == ("big", 5)
        assert body.keys().isdisjoint({"max_tokens", "priority"})
        await gateway.http.post("/v1/completions", json={"model": "chat", "prompt": "x", "max_tokens": 999})
        assert hosted.bodies()[-1]["max_tokens"] == 50, "never more than the spec allows"
        embedded = await gateway.http.post("/v1/embeddings", json={"model": "chat", "input": "x"})
        assert embedded.json()["model"] == "chat"
        answer = await gateway.http.post("/v1/responses", json={"model": "chat", "input": "hi", "max_output_tokens": 3})
        assert (answer.status_code, answer.json()["model"]) == (200, "chat")
        assert [model["id"] for model in (await gateway.http.get("/v1/models")).json()["data"]] == ["chat"]
        refused = await gateway.http.post("/v1/messages", json=chat("chat"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (
            "chat/completions"
            in (await gateway.http.post("/tokenize", json={"prompt": "x"})).json()["error"]["message"]
        )


@pytest.mark.asyncio
@pytest.mark.parametrize(("takes_s", "status"), [(590.0, 200), (610.0, 503)])
async def test_a_whole_answer_may_take_ten_minutes(takes_s: float, status: int) -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", **HOSTED)
        hosted.takes_s = takes_s
        answer = await gateway.http.post("/v1/chat/completions", json=chat("chat"))
        assert answer.status_code == status


class Slow(httpx.AsyncByteStream):
    """A stream whose events come after these pauses."""

    def __init__(self, *pauses_s: float) -> None:
        self._pauses_s = pauses_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for pause_s in self._pauses_s:
            await asyncio.sleep(pause_s)
            yield b'data: {"choices": []}\n\n'


@pytest.mark.parametrize(
    ("pauses_s", "events", "status"), [((590.0, 110.0), 2, 200), ((590.0, 130.0), 1, 503), ((610.0,), 0, 503)]
)
def test_a_stream_is_left_when_it_is_silent_for_two_minutes_after_its_first_event(
    pauses_s: tuple[float, ...], events: int, status: int
) -> None:
    async def relayed() -> tuple[list[bytes], int]:
        track: Any = MagicMock()
        answer = httpx.Response(200, stream=Slow(*pauses_s))
        stream = _RelayedStream(answer, UsageReader("chat", 1, shows_usage=True), MagicMock(), "hosted:big", track)
        return [event async for event in stream._events()], stream._status

    found, ended = run_virtually(relayed())
    assert (sum(b'"choices"' in event for event in found), ended) == (events, status)
    assert any(b"broke off" in event for event in found) == (status == 503)


@pytest.mark.asyncio
@pytest.mark.parametrize("shows_usage", [True, False])
async def test_a_stream_passes_through(shows_usage: bool) -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", **HOSTED)
        asked = {"stream_options": {"include_usage": True}} if shows_usage else {}
        answer = await gateway.http.post("/v1/chat/completions", json=chat("chat", stream=True, **asked))
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert {chunk["model"] for chunk in chunks} == {"chat"}
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == "far f"
        assert any(not chunk["choices"] for chunk in chunks) == shows_usage
        assert hosted.bodies()[0]["stream_options"]["include_usage"] is True


@pytest.mark.asyncio
async def test_a_fallback_answers_while_no_replica_is_ready_or_all_are_full() -> None:
    async with hosted_gateway() as (gateway, _):
        await gateway.deploy("chat", fallback=BACKEND)
        assert await says(gateway) == ("far f", "hosted")
        busy = FakeEngine(reply="near ", tokens_per_s=100.0, max_running=1, max_waiting=1)
        await gateway.deploy("chat", busy, fallback=BACKEND)
        assert await says(gateway) == ("near ", "chat-0")
        long = chat("chat", max_tokens=4000, stream=True)
        asking = [asyncio.ensure_future(gateway.http.post("/v1/chat/completions", json=long)) for _ in range(2)]

        async def is_full() -> bool:
            stats = await busy.stats()
            return stats.running + stats.waiting == 2

        await until(is_full)
        assert await says(gateway) == ("far f", "hosted")
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_fallback_answers_what_the_only_replica_died_with() -> None:
    """A request does not wait for the next replica, as it does without a fallback."""
    async with hosted_gateway() as (gateway, _):
        slow = FakeEngine(reply="near ", tokens_per_s=0.01)
        await gateway.deploy("chat", slow, fallback=BACKEND)
        asking = asyncio.ensure_future(says(gateway))

        async def is_asked() -> bool:
            return (await slow.stats()).running == 1

        await until(is_asked)
        await gateway.kill("chat-0")
        async with asyncio.timeout(60.0):
            assert await asking == ("far f", "hosted")


@pytest.mark.asyncio
async def test_a_request_on_a_route_that_the_fallback_lacks_waits_for_a_replica() -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", fallback=BACKEND)

        async def message() -> str:
            answer = await gateway.http.post("/v1/messages", json=chat("chat"))
            assert answer.status_code == 200, answer.text
            return str(answer.json()["content"][0]["text"])

        async def waits() -> bool:
            return gateway.models.endpoint("chat")[1].waiting == 1

        first = asyncio.ensure_future(message())
        await until(waits)
        slow = FakeEngine(reply="near ", tokens_per_s=1.0)
        await gateway.deploy("chat", slow, fallback=BACKEND)

        async def is_asked() -> bool:
            return (await slow.stats()).running == 1

        await until(is_asked)
        await gateway.kill("chat-0")
        await until(waits)
        await gateway.deploy("chat", FakeEngine(reply="near "), fallback=BACKEND)
        async with asyncio.timeout(60.0):
            assert await first == "near "
        assert hosted.requests == []


async def says(gateway: Gateway) -> tuple[str, str]:
    answer = await gateway.http.post("/v1/chat/completions", json=chat("chat"))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.headers["x-raytide-replica"]


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_it_is_billed_at_its_own_price_under_its_own_name(
    line: Line,  # noqa: F811
    store: Store,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
    stream: bool,
) -> None:
    headers = {"authorization": f"Bearer {secret_of(models=['chat'], budget={'usd': 1.0})}"}
    async with hosted_gateway(api=line.api(), requires_keys=True) as (gateway, _):
        await gateway.deploy("chat", fallback=BACKEND, price={"prompt": 1.0, "completion": 1.0})
        await gateway.deploy("other", **HOSTED)
        body = chat("chat", stream=stream)
        answer = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
        ids = set(re.findall(r'"id": "(.*?)"', answer.text))
        refused = await gateway.http.post("/v1/chat/completions", json=chat("other"), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    (row,) = [row for row in store.tenancy.usage.rows(UsageFilter())[0] if row.status == 200]
    assert (row.model, row.version, row.completion_tokens) == ("chat", "hosted:big", 5)
    assert ids == {f"chatcmpl-{row.id}"}, "by which the answer can be judged"
    assert row.cost_micro_usd == row.prompt_tokens * 3 + 5 * 7


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("status", "seen", "code"),
    [(400, 400, None), (401, 503, "hosted_api"), (404, 503, "hosted_api"), (429, 429, "rate_limit_exceeded"),
     (500, 503, "hosted_api")],
)  # fmt: skip
async def test_its_errors_are_told_without_its_key(
    status: int, seen: int, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", **HOSTED)
        hosted.status = status
        answer = await gateway.http.post("/v1/chat/completions", json=chat("chat"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (seen, code)
        if status != 400:  # what it says of the request itself is passed on
            assert KEY not in answer.text
        hosted.status, hosted.error = 200, httpx.ConnectError("nobody is there")
        gone = await gateway.http.post("/v1/chat/completions", json=chat("chat"))
        assert (gone.status_code, gone.json()["error"]["code"]) == (503, "hosted_api")
    assert KEY not in caplog.text


@pytest.mark.asyncio
async def test_an_api_that_the_operator_has_not_allowed_is_never_asked() -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", **{**HOSTED, "backend": {**BACKEND, "base_url": "http://169.254.169.254/v1"}})
        answer = await gateway.http.post("/v1/chat/completions", json=chat("chat"))
        assert (answer.status_code, hosted.requests) == (503, [])


def test_keys_come_from_the_environment_and_do_not_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTED_KEY", KEY)
    apis = [HostedApi(base_url=url, api_key_env="HOSTED_KEY") for url in (URL, "https://two.example/v1")]
    made = HostedApis.from_environment(apis)
    assert made._keys == {URL: KEY, "https://two.example/v1": KEY}
    import os

    assert "HOSTED_KEY" not in os.environ


def test_a_stream_that_breaks_off_counts_the_pieces_so_far() -> None:
    reader = UsageReader("chat", 10, shows_usage=False)
    event = b'data: {"choices": [{"delta": {"content": "x"}}], "model": "big"}\n\n'
    seen = [part for start in range(0, 3 * len(event), 7) for part in reader.events((event * 3)[start : start + 7])]
    assert len([part for part in seen if part.startswith(b"data: ")]) == 3
    assert (reader.usage.prompt_tokens, reader.usage.completion_tokens) == (10, 3)


class Endless(httpx.AsyncBaseTransport, httpx.AsyncByteStream):
    """A hosted API whose answer never ends."""

    def __init__(self) -> None:
        self.is_closed, self.asked = False, asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        return httpx.Response(200, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b'data: {"choices": []}\n\n'

    async def aclose(self) -> None:
        self.is_closed = True


async def test_a_stream_whose_client_left_before_it_began_is_closed_and_ends_its_reservation(
    line: Line,  # noqa: F811
    store: Store,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
) -> None:
    hosted, body = Endless(), json.dumps(chat("chat", stream=True)).encode()
    secret = secret_of(budget={"usd": 1})
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await hosted.asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)  # the connection is full

    async with running_gateway(hosted=HostedApis({URL: KEY}, hosted), api=line.api(), requires_keys=True) as gateway:
        await gateway.deploy("chat", **HOSTED)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"authorization", f"Bearer {secret}".encode()), (b"content-type", b"application/json")],
            "client": None,
            "server": None,
        }
        app = gateway.http._transport.app  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            await app(scope, receive, send)
        assert hosted.is_closed

        async def is_settled() -> bool:
            return [row.status for row in store.tenancy.usage.rows(UsageFilter())[0]] == [499]

        await until(is_settled)
        assert store.tenancy.spending.spent(["key-1"], 1e9)["key-1"].reserved == 0


@pytest.mark.asyncio
async def test_a_silent_api_is_left_at_the_timeout_of_the_request_or_with_its_client() -> None:
    async with hosted_gateway() as (gateway, hosted):
        await gateway.deploy("chat", **HOSTED)
        hosted.is_silent = True
        for more in ({}, {"stream": True}):
            answer = await gateway.http.post("/v1/chat/completions", json=chat("chat", timeout=0.2, **more))
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        body = json.dumps(chat("chat")).encode()
        answered = ask(gateway.app, "/v1/chat/completions", body, leaves_after_body=True)
        assert (await asyncio.wait_for(answered, 60)).status == 499
        assert hosted.left == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_team_leaves_connections_to_others(
    line: Line,  # noqa: F811
    secret_of: Callable[..., str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    monkeypatch.setattr(hosted_apis, "_MOST_CONNECTIONS", 4)
    keys = {team: {"authorization": f"Bearer {secret_of(team=team)}"} for team in ("red", "blue")}
    async with hosted_gateway(api=line.api(), requires_keys=True) as (gateway, hosted):
        await gateway.deploy("chat", **HOSTED)

        async def asked(team: str) -> int:
            body = chat("chat", stream=stream)
            return (await gateway.http.post("/v1/chat/completions", json=body, headers=keys[team])).status_code

        hosted.is_silent = True
        asking = [asyncio.ensure_future(asked("red")) for _ in range(2)]

        async def are_asked() -> bool:
            return len(hosted.requests) == len(asking)

        await until(are_asked)
        assert await asyncio.wait_for(asked("red"), 60) == 429
        asking.append(asyncio.ensure_future(asked("blue")))
        await until(are_asked)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        hosted.is_silent = False
        assert [await asked("red") for _ in range(5)] == [200] * 5


@pytest.mark.asyncio
@pytest.mark.parametrize("options", ["x", [1], 5])
async def test_stream_options_of_any_kind_lose_no_connection(options: object) -> None:
    async with hosted_gateway() as (gateway, _):
        await gateway.deploy("chat", **HOSTED)
        body = {"model": "chat", "input": "hi", "max_output_tokens": 3, "stream_options": options}
        assert (await gateway.http.post("/v1/responses", json=body)).status_code == 200
