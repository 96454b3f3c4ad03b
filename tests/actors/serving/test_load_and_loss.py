"""A server survives too much work, failures of the engine, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable

import httpx
import openai
import pytest
from openai import OpenAI

from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.types import EngineStats, GenChunk, GenRequest
from raytide.actors.serving.health import ProgressWatch
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import CompletionRequest
from raytide.core.errors import OverloadedError

Serve = Callable[..., str]
ClientOf = Callable[[str], OpenAI]
HELLO = [{"role": "user", "content": "hello"}]
SLOW = 20.0  # tokens per second: 200 of them outlast every test


class BreaksAfterTwo(FakeEngine):
    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        said = 0
        async for chunk in super().generate(request):
            if said == 2:
                raise RuntimeError("the secret reason")
            said += 1
            yield chunk


def running(url: str) -> tuple[float, float]:
    """Requests running and waiting, by the replica's own metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    return values["raytide_requests_running"], values["raytide_requests_waiting"]


def wait_until(url: str, expected: tuple[float, float]) -> None:
    deadline = time.monotonic() + 60
    while running(url) != expected:
        assert time.monotonic() < deadline, f"still {running(url)}, not {expected}"
        time.sleep(0.01)


def test_a_full_queue_is_a_429_that_says_when_to_retry(serve: Serve, client_of: ClientOf) -> None:
    url = serve(FakeEngine(tokens_per_s=0.01, max_running=1, max_waiting=1))
    client = client_of(url)
    body = json.dumps({"model": "fake", "messages": HELLO}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            asking = stack.enter_context(socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=60))
            asking.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        wait_until(url, (1, 1))
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="fake", messages=HELLO)
        assert (caught.value.type, caught.value.code) == ("requests", "rate_limit_exceeded")
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="fake", messages=HELLO, stream=True)


def test_a_client_that_leaves_a_stream_frees_its_place(serve: Serve, client_of: ClientOf) -> None:
    url = serve(FakeEngine(tokens_per_s=SLOW))
    stream = client_of(url).chat.completions.create(model="fake", messages=HELLO, max_tokens=200, n=2, stream=True)
    next(iter(stream))
    assert running(url) == (1, 0)  # both choices are one request of the engine
    stream.close()
    wait_until(url, (0, 0))
    assert 'outcome="aborted"' in httpx.get(f"{url}/metrics", timeout=60).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_byte_frees_its_place(serve: Serve, stream: bool) -> None:
    url = serve(FakeEngine(tokens_per_s=0.01))
    body = {"model": "fake", "messages": HELLO, "max_tokens": 200, "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=0.5)
    wait_until(url, (0, 0))


def test_an_engine_that_fails_in_mid_stream_ends_it_with_an_error_event(serve: Serve, client_of: ClientOf) -> None:
    url = serve(BreaksAfterTwo())
    said: list[str] = []

    def read() -> None:
        for chunk in client_of(url).chat.completions.create(model="fake", messages=HELLO, stream=True):
            said.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError) as caught:
        read()
    assert "".join(said) == "ti"
    assert (caught.value.type, caught.value.code) == ("server_error", "internal_error")
    assert "secret" not in str(caught.value.body)
    raw = httpx.post(
        f"{url}/v1/chat/completions", json={"model": "fake", "messages": HELLO, "stream": True}, timeout=60
    ).text
    assert set(json.loads(raw.strip().split("\n\n")[-1].removeprefix("data: "))["error"]) == {
        "message", "type", "param", "code",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_before_the_first_token_gives_a_500(
    serve: Serve, client_of: ClientOf, stream: bool
) -> None:
    url = serve(FakeEngine(fail_on="boom"))
    with pytest.raises(openai.InternalServerError) as caught:
        client_of(url).completions.create(model="fake", prompt="boom", stream=stream)
    assert (caught.value.status_code, caught.value.code) == (500, "engine")


def test_metrics_count_every_outcome_and_time_every_token(serve: Serve, client_of: ClientOf) -> None:
    url = serve(FakeEngine(fail_on="boom"))
    client = client_of(url)
    client.completions.create(model="fake", prompt="hello", max_tokens=5)
    for prompt, extra in (("boom", {}), ("hello", {"temperature": 9})):
        with pytest.raises(openai.APIStatusError):
            client.completions.create(model="fake", prompt=prompt, **extra)  # type: ignore[arg-type]
    text = httpx.get(f"{url}/metrics", timeout=60).text
    for outcome, code in (("ok", ""), ("error", "engine"), ("invalid", "")):
        labels = f'api="completions",code="{code}",endpoint="fake",outcome="{outcome}",revision=""'
        assert f"raytide_requests_total{{{labels}}} 1.0" in text
    assert 'raytide_time_to_first_token_seconds_count{endpoint="fake",revision=""} 1.0' in text
    assert 'raytide_generated_tokens_total{endpoint="fake",replica="",revision=""} 5.0' in text
    for phase in ("queue", "prefill", "decode"):
        assert f'raytide_{phase}_seconds_count{{endpoint="fake",revision=""}} 1.0' in text
    assert 'raytide_finished_total{endpoint="fake",reason="length"} 1.0' in text


def test_a_dead_engine_is_unhealthy_and_refuses_what_comes(serve: Serve) -> None:
    url = serve(FakeEngine(die_on="poison"))
    ask = {"model": "fake", "prompt": "poison"}
    killer = httpx.post(f"{url}/v1/completions", json=ask, timeout=60)
    assert (killer.status_code, killer.json()["error"]["code"]) == (503, "engine_dead")
    for route, body in (("completions", ask | {"prompt": "hello"}), ("embeddings", {"model": "fake", "input": "x"})):
        late = httpx.post(f"{url}/v1/{route}", json=body, timeout=60)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
    health = httpx.get(f"{url}/health", timeout=60)
    assert (health.status_code, "died" in health.json()["status"]) == (503, True)
    assert httpx.get(f"{url}/metrics", timeout=60).status_code == 503


def test_a_task_that_ends_without_a_word_does_not_leave_its_client_waiting(serve: Serve) -> None:
    class Panics(FakeEngine):
        async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
            if request.request_id:
                raise BaseException("a panic in Rust")
            yield

    answer = httpx.post(f"{serve(Panics())}/v1/completions", json={"model": "fake", "prompt": "x"}, timeout=60)
    assert answer.status_code == 500


def test_health_follows_progress_not_the_port(serve: Serve) -> None:
    assert httpx.get(f"{serve(FakeEngine())}/health", timeout=60).json() == {"status": "ok"}
    watch = ProgressWatch(limit_s=10.0)
    assert watch.problem(EngineStats(running=1, steps=1), 0.0) is None
    assert watch.problem(EngineStats(running=1, steps=2), 9.0) is None
    assert watch.problem(EngineStats(running=1, steps=2), 19.0) is None
    assert "took no step" in str(watch.problem(EngineStats(running=1, waiting=3, steps=2), 19.5))


def test_an_idle_engine_is_healthy_however_long_it_rests() -> None:
    watch = ProgressWatch(limit_s=10.0)
    assert watch.problem(EngineStats(steps=5), 0.0) is None
    assert watch.problem(EngineStats(steps=5), 1000.0) is None
    assert watch.problem(EngineStats(running=1, steps=5), 1005.0) is None


def test_a_stopping_server_lets_requests_end_and_refuses_new_ones() -> None:
    async def scenario() -> None:
        server = Server(FakeEngine(tokens_per_s=1000), model="fake", drain_s=60.0)
        await server.start()
        request = CompletionRequest(model="fake", prompt="hello", max_tokens=20)
        batches = (await server.generate(request)).batches()
        await anext(batches)
        stopping = asyncio.create_task(server.stop())
        assert [pieces[0].finish_reason async for pieces in batches][-1] == "length"
        await stopping
        with pytest.raises(OverloadedError):
            await anext((await server.generate(request)).batches())

    asyncio.run(scenario())
