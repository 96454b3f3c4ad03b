"""A prompt computed in one engine's process and decoded in another gives the very text of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.virtual_loop import run_virtually

from raytide.actors.engine import LLM, EngineConfig, FakeEngine, GenChunk, GenRequest, NativeEngine, SamplingParams
from raytide.actors.engine.backends.remote import handover
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.direct_output import DirectOutput
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.core.errors import EngineDeadError

TIMEOUT_S = 120.0
PROMPT = list(range(40, 100))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, ignore_eos=True, seed=3)
LOGPROBS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED, "log probabilities": LOGPROBS}


async def no_problem() -> None:
    return None


class Pair:
    """Two engines, each behind a socket of its own, and a client of the second."""

    def __init__(self, engines: list[NativeEngine], servers: list[EngineServer], client: RemoteEngine, port: int):
        self.engines, self.servers, self.client = engines, servers, client
        self.prefill_at = ("127.0.0.1", port, "secret", "first")

    async def answer(self, request: GenRequest) -> tuple[list[int], str, str | None, Any]:
        tokens, text, reason, marks = [], "", None, []
        async for chunk in self.client.generate(request, prefill_at=self.prefill_at):
            tokens += chunk.token_ids
            text += chunk.text
            marks += chunk.logprobs or ()
            reason = chunk.finish_reason or reason
        return tokens, text, reason, marks

    async def computed(self) -> list[float]:
        """Returns the prompt tokens that each engine has computed, as the controller learns of them."""
        return [(await server.status())[2]["prompt_tokens"] for server in self.servers]


@asynccontextmanager
async def pair(model_dir: Path, **options: Any) -> AsyncIterator[Pair]:
    fields = {"model_dir": str(model_dir), "block_size": 4, "max_model_len": 128, **options}
    engines = [NativeEngine(EngineConfig.parse(fields, where="test")) for _ in range(2)]
    servers = [EngineServer(engine, await engine.start(), "secret", problem=no_problem) for engine in engines]
    ports = [await server.listen("127.0.0.1") for server in servers]
    client = RemoteEngine("127.0.0.1", ports[1], "secret")
    await client.start()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield Pair(engines, servers, client, ports[0])
    finally:
        await client.shutdown()
        for server in servers:
            await server.close()
        for engine in engines:
            await engine.shutdown()


def ask(name: str = "r", sampling: SamplingParams = GREEDY) -> GenRequest:
    return GenRequest(request_id=name, prompt=PROMPT, sampling=sampling)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, tuple[list[int], str]]:
    llm = LLM(model_dir, block_size=4, max_model_len=128)
    answers = {name: llm.generate([PROMPT], each)[0].outputs[0] for name, each in SAMPLINGS.items()}
    return {name: (list(answer.token_ids), answer.text) for name, answer in answers.items()}


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_the_text_is_that_of_one_engine(model_dir: Path, expected: Any, name: str) -> None:
    sampling = SAMPLINGS[name]
    async with pair(model_dir) as both:
        tokens, text, reason, marks = await both.answer(ask(sampling=sampling))
        assert (tokens, text, reason) == (*expected[name], "length")
        assert len(marks) == (len(tokens) if sampling.logprobs else 0)
        assert await both.computed() == [len(PROMPT), 0]
        for engine in both.engines:
            stats = await engine.stats()
            assert (stats.running, stats.free_blocks) == (0, stats.num_blocks)


async def test_many_at_once(model_dir: Path, expected: Any) -> None:
    async with pair(model_dir, max_running=8) as both:
        names = ["greedy", "seeded"] * 20
        asked = [ask(f"r{number}", SAMPLINGS[name]) for number, name in enumerate(names)]
        answers = await asyncio.gather(*(both.answer(each) for each in asked))
        for name, (tokens, text, _, _) in zip(names, answers, strict=True):
            assert (tokens, text) == expected[name]
        assert sum(await both.computed()) < 2 * len(asked) * len(PROMPT)


async def test_an_answer_of_one_token_ends_at_the_first_process(model_dir: Path, expected: Any) -> None:
    async with pair(model_dir) as both:
        tokens, _, reason, _ = await both.answer(ask(sampling=replace(GREEDY, max_tokens=1)))
        assert (tokens, reason) == (expected["greedy"][0][:1], "length")


@pytest.mark.parametrize("fault", ["nobody listens", "it dies meanwhile", "damaged", "refused"])
async def test_whatever_fails_the_prompt_is_computed_here(
    model_dir: Path, expected: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(model_dir) as both:
        if fault == "nobody listens":
            await both.servers[0].close()
        elif fault == "it dies meanwhile":

            async def dying(*arguments: object) -> Any:
                raise EngineDeadError("gone")

            monkeypatch.setattr(RemoteEngine, "prefill", dying)
        elif fault == "damaged":
            from_bytes = handover.KvHandle.from_bytes
            monkeypatch.setattr(handover.KvHandle, "from_bytes", lambda data: from_bytes(data[:-1]))
        else:
            await both.engines[1].load_weights(str(model_dir), "another version")
        tokens, text, _, _ = await both.answer(ask())
        assert (tokens, text) == expected["greedy"]


async def test_a_client_that_leaves_frees_both(model_dir: Path) -> None:
    async with pair(model_dir) as both:
        await both.engines[0].pause()  # the prompt stays in the first one's queue
        leaving = asyncio.create_task(both.answer(ask()))
        while not (await both.engines[0].stats()).waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        while (await both.engines[0].stats()).waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not both.servers[1].handover._asking
        assert not both.servers[1].admission._entries


async def test_another_team_takes_the_place_of_a_request_that_waits_for_its_kv(model_dir: Path, expected: Any) -> None:
    async with pair(model_dir, max_running=1) as both:
        await both.engines[0].pause()
        waiting = asyncio.create_task(both.answer(ask("heavy")))
        while not both.servers[1].handover._asking:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        urgent = replace(ask("light"), team="light", priority=-1)
        light = [chunk async for chunk in both.client.generate(urgent)]
        assert [token for chunk in light for token in chunk.token_ids] == expected["greedy"][0]
        await both.engines[0].resume()
        tokens, text, _, _ = await waiting
        assert (tokens, text) == expected["greedy"]


class Remote:
    """A connection to a peer. One to "silent" fails after five seconds, as if every packet were dropped."""

    started: list[str]

    def __init__(self, host: str, port: int, secret: str, *, name: str) -> None:
        self._name, self.is_connected = name, False

    async def start(self) -> None:
        self.started.append(self._name)
        if self._name == "silent":
            await asyncio.sleep(5.0)
            raise EngineDeadError("no answer")
        self.is_connected = True

    async def prefill(self, request: GenRequest) -> tuple[list[GenChunk], bytes]:
        return [GenChunk(request.request_id, [1], "x")], b""

    async def shutdown(self) -> None:
        self.is_connected = False


def test_a_silent_peer_holds_up_its_own_first_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "RemoteEngine", Remote)
    monkeypatch.setattr(Remote, "started", [], raising=False)
    silent, healthy = (handover.PrefillPeer("127.0.0.1", 1, "secret", name) for name in ("silent", "healthy"))

    async def body() -> None:
        now_s = asyncio.get_running_loop().time
        engine = handover.HandoverEngine(FakeEngine(), DirectOutput())
        waiting = [asyncio.create_task(engine._ask(silent, ask(f"r{number}"))) for number in range(20)]
        await asyncio.sleep(0)
        assert (await engine._ask(healthy, ask()))[0] and now_s() == 0.0
        waiting.pop(0).cancel()
        assert await asyncio.gather(*waiting) == [([], None)] * 19 and now_s() == 5.0
        assert await engine._ask(silent, ask()) == ([], None) and now_s() == 5.0
        assert Remote.started == ["silent", "healthy"]
        await asyncio.sleep(handover._RETRY_S)
        assert await engine._ask(silent, ask()) == ([], None)
        assert (await engine._ask(healthy, ask()))[0]
        assert Remote.started == ["silent", "healthy", "silent"]
        await engine.close()

    run_virtually(body())
