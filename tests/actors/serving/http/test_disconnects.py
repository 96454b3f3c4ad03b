"""Clients that go away at each stage of a request, and engines that die: everything that was taken comes back, and
everybody is told.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.actors.engine.tiny import save_llama
from tests.actors.serving.asgi import ask

from raytide.actors.engine import EngineConfig, NativeEngine, SamplingParams
from raytide.actors.engine.backends.fake import FakeEngine
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.output_processor import Output
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server

Serve = Callable[..., str]
LONG: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 200, "ignore_eos": True}
CLIENTS = 12
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_llama(path)
    return path


@pytest.fixture
def engine(model_dir: Path) -> NativeEngine:
    return NativeEngine(EngineConfig(model_dir=str(model_dir), block_size=16, max_running=4, prefix_cache=False))


def test_what_an_aborted_request_held_is_free_before_the_next_step(model_dir: Path) -> None:
    """The gateway and the server abort a request when its client leaves; the engine does so between two steps."""
    core = EngineCore(EngineConfig.parse({"model_dir": str(model_dir), "prefix_cache": False}, where="test"))
    request = GenRequest(request_id="r", prompt=[1] * 40, sampling=SamplingParams(max_tokens=20, ignore_eos=True))
    core.add(request, [1] * 40)
    for _ in range(3):
        core.step()
    assert core.pool.num_free < core.pool.num_blocks
    assert core.abort("r")
    assert core.pool.num_free == core.pool.num_blocks
    assert not core.has_work


def taken(engine: NativeEngine) -> dict[str, int]:
    """Everything that a request may hold in the engine."""
    loop = engine._started()
    sampler, batch = loop.runner._sampler, loop.runner._batch
    return {
        "blocks": loop.pool.num_blocks - loop.pool.num_free,
        "running": len(loop.scheduler.running),
        "waiting": len(loop.scheduler.waiting),
        "answers": len(loop._requests),
        "samples": len(loop._samples),
        "streams": len(engine._streams),
        "preparing": len(engine._preparing),
        "texts": loop.tokenizer.pool._jobs,
        "compiling": len(loop.input_processor.grammars._compiling),
        "occurrences": len(sampler._occurrences),
        "grammar states": len(sampler._constraint._states) + len(sampler._constraint._strikes),
        "rows": len(batch._row_of),
    }


def sent(url: str, data: bytes) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    client.sendall(data)
    return client


def posted(fields: dict[str, Any], path: str = "/v1/completions") -> tuple[bytes, bytes]:
    body = json.dumps(LONG | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode(), body


def wait_for(holds: Callable[[], bool], why: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, why()
        time.sleep(0.01)


HARD = {"guided_regex": "(a|b)*a(a|b){14}", "bad_words": ["x y z"], "stop": ["never said"]}
STAGES = {
    "in the headers": lambda: posted({})[0][:40],
    "before the body": lambda: posted({})[0],
    "in the body": lambda: b"".join(posted({}))[:-10],
    "while its texts are prepared": lambda: b"".join(posted(HARD | {"prompt": "word " * 30})),
    "while it waits": lambda: b"".join(posted({"stream": True, "n": 4})),
    "an answer in one piece": lambda: b"".join(posted({"best_of": 3, "repetition_penalty": 1.2})),
    "embeddings": lambda: b"".join(posted({"input": ["x y"] * 50} | dict.fromkeys(LONG), "/v1/embeddings")),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("resets", [False, True])
def test_what_a_client_held_that_went_away_comes_back(
    serve: Serve, engine: NativeEngine, stage: str, resets: bool
) -> None:
    url = serve(engine, "m")
    data = STAGES[stage]()
    clients = [sent(url, data) for _ in range(CLIENTS)]
    if stage == "while it waits":
        clients[0].recv(100)
    for client in clients:
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()
    wait_for(lambda: not any(taken(engine).values()), lambda: taken(engine))
    answer = httpx.post(f"{url}/v1/completions", json=LONG | HARD | {"max_tokens": 3}, timeout=TIMEOUT_S)
    assert answer.status_code == 200
    wait_for(lambda: not any(taken(engine).values()), lambda: taken(engine))


@pytest.mark.parametrize("fault", [BaseException("a panic"), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_clients_of_an_engine_whose_steps_fail_are_told(
    serve: Serve, engine: NativeEngine, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of one step ends the requests in it; what ends the thread is told to them and to all who come."""
    url = serve(engine, "m")
    step, faults = EngineCore.step, [fault]

    def failing(self: EngineCore) -> list[Output]:
        if faults and any(sample.seq.output_len > 2 for _, sample in self._samples.values()):
            raise faults.pop()
        return step(self)

    monkeypatch.setattr(EngineCore, "step", failing)
    answer = httpx.post(f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=TIMEOUT_S)
    last = answer.text.strip().rpartition("data: ")[2]
    assert answer.status_code == 200
    assert set(json.loads(last)["error"]) == {"message", "type", "param", "code"}
    after = httpx.post(f"{url}/v1/completions", json=LONG | {"max_tokens": 2}, timeout=TIMEOUT_S)
    health = httpx.get(f"{url}/health", timeout=TIMEOUT_S)
    if isinstance(fault, SystemExit | KeyboardInterrupt):
        assert (after.status_code, health.status_code) == (503, 503)
        assert after.json()["error"]["code"] == "engine_dead"
    else:
        assert (after.status_code, health.status_code) == (200, 200)


async def test_a_stream_that_is_cancelled_with_everything_else_is_no_answer() -> None:
    """As at the end of an event loop. An answer that is cut off would look whole to whoever asked in this process."""
    engine = FakeEngine(tokens_per_s=20.0)
    server = Server(engine, model="m")
    await server.start()
    body = json.dumps({"model": "m", "prompt": "x", "max_tokens": 4000, "stream": True}).encode()
    asking = asyncio.create_task(ask(create_app(server, owns_server=False), "/v1/completions", body))
    async with asyncio.timeout(TIMEOUT_S):
        while not (await engine.stats()).generated_tokens:  # noqa: ASYNC110  # the engine has no event for it
            await asyncio.sleep(0.01)
    for task in [*asyncio.all_tasks() - {asyncio.current_task(), asking}, asking]:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await server.stop()
