"""Equal requests are computed once, and unequal ones never share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.engine.types import GenChunk, GenRequest, SampleProgress, TokenUsage
from raytide.actors.serving.openai_api.respond import KEPT
from raytide.core.errors import EngineError
from raytide.core.objects.endpoint import AnswerCachePolicy
from raytide.gateway.answers.shared_answers import MAX_TOKENS, AnswerCache, Reuse, SharedAnswers, answer_key

GREEDY = SamplingParams(temperature=0)
REQUEST = GenRequest(request_id="a", prompt=[1, 2, 3], sampling=GREEDY, keep_answer=True)
TIMEOUT_S = 120.0


class Generator:
    """Generates `length` tokens for each request, one whenever the test allows it."""

    def __init__(self, length: int = 4, fails_at: int = -1) -> None:
        self.length, self.fails_at = length, fails_at
        self.started: list[str] = []
        self.ended: list[str] = []
        self.go = asyncio.Semaphore(0)

    async def __call__(self, request: GenRequest) -> AsyncIterator[GenChunk]:
        self.started.append(request.request_id)
        try:
            for token in range(self.length):
                await self.go.acquire()
                if token == self.fails_at:
                    raise EngineError("it broke.")
                last = token == self.length - 1
                usage = TokenUsage(3, self.length) if last else None
                yield GenChunk(request.request_id, [token], f"{token} ", "length" if last else None, usage, replica="r")
        finally:
            self.ended.append(request.request_id)

    def release(self, count: int = 10_000) -> None:
        for _ in range(count):
            self.go.release()


class Shared(SharedAnswers):
    def __init__(self, generator: Generator) -> None:
        self.reused: list[Reuse] = []
        self.weights = "v1"
        super().__init__(generator, lambda lora: self.weights, self.reused.append)


async def text_of(shared: SharedAnswers, request: GenRequest) -> str:
    async with asyncio.timeout(TIMEOUT_S):
        chunks = [chunk async for chunk in shared.generate(request)]
    assert {chunk.request_id for chunk in chunks} == {request.request_id}
    assert chunks[-1].usage is not None
    return "".join(chunk.text for chunk in chunks)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def named(name: str) -> GenRequest:
    return replace(REQUEST, request_id=name)


async def test_equal_requests_in_flight_are_computed_once() -> None:
    generator = Generator()
    shared = Shared(generator)
    asking = [asyncio.create_task(text_of(shared, named(f"{at}"))) for at in range(5)]
    await turns()
    generator.release(2)
    await turns()
    asking.append(asyncio.create_task(text_of(shared, named("late"))))
    generator.release()
    assert set(await asyncio.gather(*asking)) == {"0 1 2 3 "}
    assert generator.started == generator.ended == ["0"]
    assert shared.reused == ["in_flight"] * 5


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_one_that_leaves_does_not_end_the_others(leaver: int) -> None:
    generator = Generator()
    shared = Shared(generator)
    asking = [asyncio.create_task(text_of(shared, named(f"{at}"))) for at in range(3)]
    await turns()
    generator.release(1)
    await turns()
    asking[leaver].cancel()
    generator.release()
    texts = await asyncio.gather(*asking, return_exceptions=True)
    assert [text for at, text in enumerate(texts) if at != leaver] == ["0 1 2 3 "] * 2
    assert generator.started == ["0"]


async def test_the_last_one_that_leaves_ends_the_computation() -> None:
    generator = Generator()
    shared = Shared(generator)
    asking = [asyncio.create_task(text_of(shared, named(f"{at}"))) for at in range(3)]
    await turns()
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert generator.ended == ["0"]
    assert not shared._streams


async def test_a_failure_reaches_all_and_is_not_kept() -> None:
    generator = Generator(fails_at=2)
    shared = Shared(generator)
    shared.cache.set_policy(AnswerCachePolicy())
    asking = [asyncio.create_task(text_of(shared, named(f"{at}"))) for at in range(3)]
    await turns()
    generator.release()
    assert all(isinstance(each, EngineError) for each in await asyncio.gather(*asking, return_exceptions=True))
    assert shared.cache.num_bytes == 0
    assert not shared._streams


async def test_a_slow_reader_fails_alone() -> None:
    generator = Generator(length=40_000)
    shared = Shared(generator)
    slow = shared.generate(named("slow"))
    generator.release(1)
    async with asyncio.timeout(TIMEOUT_S):
        await anext(slow)
        fast = asyncio.create_task(text_of(shared, named("fast")))
        await turns()
        generator.release(50_000)
        assert len(await fast) > 40_000
        with pytest.raises(EngineError, match="slowly"):
            async for _ in slow:
                pass
    assert generator.started == ["slow"]


async def test_a_long_stream_is_not_joined_late() -> None:
    generator = Generator(length=MAX_TOKENS + 100)
    shared = Shared(generator)
    first = asyncio.create_task(text_of(shared, named("first")))
    await turns()
    generator.release(MAX_TOKENS + 50)
    for _ in range(MAX_TOKENS):
        await asyncio.sleep(0)
    assert not next(iter(shared._streams.values())).is_joinable
    second = asyncio.create_task(text_of(shared, named("second")))
    await turns()
    generator.release()
    assert await first == await second
    assert generator.started == ["first", "second"]


async def test_a_kept_answer_is_not_computed_again() -> None:
    generator = Generator()
    shared = Shared(generator)
    shared.cache.set_policy(AnswerCachePolicy())
    generator.release()
    first = await text_of(shared, named("a"))
    chunks = [chunk async for chunk in shared.generate(named("b"))]
    assert (chunks[0].text, chunks[0].replica, chunks[0].request_id, chunks[0].usage) == (
        *(first, KEPT, "b"),
        TokenUsage(3, 4),
    )
    assert (generator.started, shared.reused) == (["a"], ["cache"])
    shared.weights = "v2"
    await text_of(shared, named("c"))
    assert generator.started == ["a", "c"]


async def test_nothing_is_kept_unless_an_endpoint_asks_for_it() -> None:
    generator = Generator()
    shared = Shared(generator)
    generator.release()
    await text_of(shared, named("a"))
    await text_of(shared, named("b"))
    assert generator.started == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, prompt=[1, 2, 4]),
        replace(REQUEST, prompt=[1, 2]),
        replace(REQUEST, cache_salt="team/"),
        replace(REQUEST, lora="x"),
        replace(REQUEST, priority=1),
        replace(REQUEST, sampling=replace(GREEDY, max_tokens=5)),
        replace(REQUEST, sampling=replace(GREEDY, stop=("x",))),
        replace(REQUEST, sampling=replace(GREEDY, logit_bias={1: 1.0})),
        replace(REQUEST, sampling=SamplingParams(temperature=1, seed=1)),
    ],
)
def test_what_changes_an_answer_changes_its_key(other: GenRequest) -> None:
    assert answer_key(REQUEST, "v") != answer_key(other, "v") is not None
    assert answer_key(REQUEST, "v") == answer_key(replace(REQUEST, request_id="b", session="s"), "v")
    assert answer_key(REQUEST, "v") != answer_key(REQUEST, "w")


@pytest.mark.parametrize(
    "request_",
    [
        replace(REQUEST, sampling=SamplingParams()),
        replace(REQUEST, sampling=replace(GREEDY, logprobs=1)),
        replace(REQUEST, sampling=replace(GREEDY, prompt_logprobs=1)),
        replace(REQUEST, resume=(SampleProgress((1,)),)),
        replace(REQUEST, prompt=[1 << 80]),
    ],
)
def test_answers_that_are_not_determined_have_no_key(request_: GenRequest) -> None:
    assert answer_key(request_, "v") is None


def answer(tokens: int) -> list[GenChunk]:
    return [GenChunk("a", [1] * tokens, "x", "stop", TokenUsage(1, tokens))]


def test_a_cache_is_bounded_in_bytes_and_time() -> None:
    now = [0.0]
    cache = AnswerCache(lambda: now[0])
    cache.set_policy(AnswerCachePolicy(ttl_s=10, max_mb=1))
    for at in range(100):
        cache.add(b"%d" % at, answer(1000))
        assert cache.num_bytes <= 1 << 20
    assert cache.find(b"0") is None
    assert cache.find(b"99") is not None
    now[0] = 10.0
    assert cache.find(b"99") is None
    cache.set_policy(None)
    assert cache.num_bytes == 0


def test_a_very_long_answer_is_not_kept() -> None:
    cache = AnswerCache()
    cache.set_policy(AnswerCachePolicy())
    cache.add(b"a", answer(MAX_TOKENS + 1))
    assert cache.num_bytes == 0


async def test_an_answer_is_kept_if_one_of_its_readers_keeps_answers() -> None:
    generator = Generator()
    shared = Shared(generator)
    shared.cache.set_policy(AnswerCachePolicy())
    plain = replace(REQUEST, keep_answer=False)
    generator.release()
    await text_of(shared, replace(plain, request_id="a"))
    assert shared.cache.num_bytes == 0
    together = [
        asyncio.create_task(text_of(shared, replace(plain, request_id="b", keep_answer=keeps)))
        for keeps in (False, True)
    ]
    await asyncio.gather(*together)
    assert shared.cache.num_bytes > 0
    await text_of(shared, replace(plain, request_id="c"))
    assert generator.started == ["a", "b", "c"]
