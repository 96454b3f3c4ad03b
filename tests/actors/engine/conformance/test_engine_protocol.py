"""Every engine keeps these promises for a single request. A test of an optional feature is skipped only where it is not
declared.
"""

import asyncio
import json
import re
from collections.abc import Callable
from typing import get_args

import pytest
from tests.actors.engine.conformance.asking import (
    ENDLESS,
    PROMPT,
    Start,
    ask,
    collect,
    need,
    slow_steps,
    text_of,
    tokens_of,
)
from tests.actors.engine.conformance.engines import MAX_LEN

from raytide.actors.engine import GenChunk, Message, SamplingParams
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.sampling_params import Structured
from raytide.actors.engine.types import Feature
from raytide.core.errors import ConflictError, OverloadedError, UsageError

# One event loop for all: vLLM belongs to the one it was started on.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_info_names_what_the_engine_can_do(start: Start) -> None:
    _, info = await start()
    assert info.features <= set(get_args(Feature))
    assert info.max_model_len == MAX_LEN
    assert info.num_blocks > 0


async def test_only_the_last_chunk_ends_the_stream_and_counts_it(start: Start) -> None:
    engine, _ = await start()
    chunks = await collect(engine, ask())
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.finish_reason == "length"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), 10) == (12, len(tokens_of(chunks)))
    assert last.timing is not None
    assert min(last.timing.queue_s, last.timing.prefill_s, last.timing.decode_s) >= 0
    assert len(chunks) > 1, "tokens come as they are made"


async def test_the_bytes_of_a_texts_tokens_are_the_text(start: Start) -> None:
    engine, info = await start()
    tokens = await engine.tokenize("import os")
    assert await engine.decode([tokens, tokens[:0]]) == ["import os", ""]
    if isinstance(engine, RemoteEngine):  # it knows the bytes of tokens whose log probabilities it was sent
        need(info, "logprobs")
        (chunk,) = await collect(engine, ask(sampling=SamplingParams(temperature=0, max_tokens=1, logprobs=2)))
        assert chunk.logprobs is not None
        tokens = [token for token, _ in chunk.logprobs[0].top]
        assert [engine.token_bytes(token).decode(errors="replace") for token in tokens] == await engine.decode(
            [[token] for token in tokens]
        )
    else:
        assert b"".join(map(engine.token_bytes, tokens)) == b"import os"


async def test_tokens_have_names_and_a_text_may_be_without_special_ones(start: Start) -> None:
    engine, _ = await start()
    tokens = await engine.tokenize("import os", special=False)
    assert tokens == (await engine.tokenize("import os"))[-len(tokens) :]
    names = await engine.pieces([*tokens, 10**6])
    assert "".join(names[:-1]).replace("\u0120", " ") == "import os"


async def test_text_prompts_are_tokenized(start: Start) -> None:
    engine, _ = await start()
    tokens = await engine.tokenize("import os")
    chunks = await collect(engine, ask(prompt="import os"))
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == len(tokens)
    assert text_of(chunks) == text_of(await collect(engine, ask(prompt=tokens)))


async def test_a_conversation_becomes_a_prompt(start: Start) -> None:
    engine, _ = await start()
    prompt = await engine.chat_prompt([Message("user", "hi")])
    assert len(await collect(engine, ask(prompt=prompt))) > 0


async def test_without_max_tokens_it_runs_until_the_context_is_full(start: Start) -> None:
    engine, _ = await start()
    chunks = await collect(engine, ask(sampling=ENDLESS))
    assert len(tokens_of(chunks)) == MAX_LEN - len(PROMPT)
    assert chunks[-1].finish_reason == "length"


async def test_a_stop_token_ends_the_text_before_it(start: Start) -> None:
    engine, _ = await start()
    free = tokens_of(await collect(engine, ask()))
    stop = free[4]
    chunks = await collect(engine, ask(sampling=SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(stop,))))
    assert chunks[-1].finish_reason == "stop"
    assert tokens_of(chunks) == free[: free.index(stop) + 1]


async def test_a_stop_string_can_stay_and_is_not_looked_for_before_min_tokens(start: Start) -> None:
    engine, info = await start()
    need(info, "stop_strings")
    need(info, "min_tokens")
    free = text_of(await collect(engine, ask()))
    stop = free[3:6]
    sampling = SamplingParams(temperature=0, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True)
    assert text_of(await collect(engine, ask(sampling=sampling))) == free[: free.index(stop) + len(stop)]
    sampling = SamplingParams(temperature=0, ignore_eos=True, stop=(stop,), min_tokens=9, max_tokens=10)
    assert len(tokens_of(await collect(engine, ask(sampling=sampling)))) >= 9


async def test_a_stop_string_is_cut_out_wherever_it_straddles(start: Start) -> None:
    engine, info = await start()
    need(info, "stop_strings")
    free = text_of(await collect(engine, ask()))
    stop = free[3:6]
    chunks = await collect(engine, ask(sampling=SamplingParams(temperature=0, ignore_eos=True, stop=(stop,))))
    assert chunks[-1].finish_reason == "stop"
    assert text_of(chunks) == free[: free.index(stop)]
    assert [chunk.stop for chunk in chunks] == [""] * (len(chunks) - 1) + [stop]


@pytest.mark.parametrize("length", [0, MAX_LEN, 3 * MAX_LEN])
async def test_a_prompt_that_cannot_fit_is_refused_and_the_engine_goes_on(start: Start, length: int) -> None:
    engine, _ = await start()
    with pytest.raises(UsageError, match=str(length)):
        await collect(engine, ask(prompt=[1] * length))
    assert (await collect(engine, ask()))[-1].finish_reason == "length"
    assert (await engine.stats()).free_blocks == (await engine.stats()).num_blocks


async def test_a_request_id_in_use_is_refused(start: Start) -> None:
    engine, _ = await start()
    with slow_steps():
        stream = engine.generate(ask("same", sampling=ENDLESS))
        await anext(stream)
        with pytest.raises(ConflictError, match="same"):
            await collect(engine, ask("same"))
        await stream.aclose()  # type: ignore[attr-defined]
    assert (await collect(engine, ask("same")))[-1].finish_reason == "length"


async def test_abort_ends_the_stream_and_frees_the_blocks(start: Start) -> None:
    engine, _ = await start()
    with slow_steps():
        stream = engine.generate(ask("gone", sampling=ENDLESS))
        await anext(stream)
        assert (await engine.stats()).free_blocks < (await engine.stats()).num_blocks
        assert await engine.abort("gone")
    rest = [chunk async for chunk in stream]
    assert rest[-1].finish_reason == "abort"
    stats = await engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.num_blocks, 0, 0)
    assert not await engine.abort("gone")


async def test_tokens_are_counted_when_they_are_generated(start: Start) -> None:
    engine, _ = await start()
    before = (await engine.stats()).generated_tokens
    stream = engine.generate(ask("long", sampling=ENDLESS))
    first = await anext(stream)
    assert (await engine.stats()).generated_tokens - before >= len(first.token_ids) > 0
    await stream.aclose()  # type: ignore[attr-defined]


async def test_closing_the_stream_aborts_the_request(start: Start) -> None:
    engine, _ = await start()
    stream = engine.generate(ask("left", sampling=ENDLESS))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await collect(engine, ask("after"))
    stats = await engine.stats()
    assert (stats.free_blocks, stats.running) == (stats.num_blocks, 0)


async def test_many_at_once_each_get_what_they_get_alone(start: Start) -> None:
    engine, _ = await start(max_running=16)
    prompts = [[i + 1] * (i + 1) for i in range(64)]
    alone = [tokens_of(await collect(engine, ask(prompt=prompt))) for prompt in prompts[:5]]
    together = await asyncio.gather(*(collect(engine, ask(f"r{i}", prompt)) for i, prompt in enumerate(prompts)))
    assert [tokens_of(chunks) for chunks in together[:5]] == alone
    assert all(len(tokens_of(chunks)) == 10 for chunks in together)
    assert {chunk.request_id for chunk in together[7]} == {"r7"}
    stats = await engine.stats()
    assert stats.finished == 69
    assert stats.steps > 0


async def test_a_full_queue_refuses_and_recovers(start: Start) -> None:
    engine, _ = await start(max_running=1, max_waiting=2)
    results = await asyncio.gather(*(collect(engine, ask(f"r{i}")) for i in range(12)), return_exceptions=True)
    refused = [result for result in results if isinstance(result, BaseException)]
    assert refused
    assert all(isinstance(error, OverloadedError) for error in refused)
    assert len(results) - len(refused) >= 2
    assert (await collect(engine, ask("later")))[-1].finish_reason == "length"


async def test_seeds_decide_and_nothing_else(start: Start) -> None:
    engine, info = await start()
    need(info, "sampling")

    def seeded(seed: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=12, ignore_eos=True)

    alone = tokens_of(await collect(engine, ask(sampling=seeded(1))))
    crowd = await asyncio.gather(*(collect(engine, ask(f"r{i}", sampling=seeded(i % 3))) for i in range(9)))
    assert tokens_of(crowd[1]) == tokens_of(crowd[4]) == alone
    assert tokens_of(crowd[0]) != alone


async def test_a_penalty_of_repetition_leaves_none(start: Start) -> None:
    engine, info = await start()
    need(info, "penalties")
    sampling = SamplingParams(temperature=0, repetition_penalty=1e6, max_tokens=20, ignore_eos=True)
    tokens = tokens_of(await collect(engine, ask(sampling=sampling)))
    assert len(set(tokens) - set(PROMPT)) == len(tokens) == 20


async def test_a_repeated_prompt_is_served_from_the_prefix_cache(start: Start) -> None:
    engine, info = await start()
    need(info, "prefix_cache")
    first, second = [await collect(engine, ask(prompt=list(range(1, 100)))) for _ in range(2)]
    assert first[-1].usage is not None
    assert second[-1].usage is not None
    assert first[-1].usage.cached_tokens == 0
    assert second[-1].usage.cached_tokens >= 48
    assert tokens_of(first) == tokens_of(second)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_samples_of_one_prompt_stream_side_by_side(start: Start, temperature: float) -> None:
    engine, info = await start()
    need(info, "n")
    sampling = SamplingParams(temperature=temperature, seed=3, n=3, max_tokens=8, ignore_eos=True)
    chunks = await collect(engine, ask(sampling=sampling))
    samples = [tokens_of(chunks, index) for index in range(3)]
    assert [len(tokens) for tokens in samples] == [8, 8, 8]
    assert [[c.finish_reason for c in chunks if c.index == i][-1] for i in range(3)] == ["length"] * 3
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (len(PROMPT), 24)
    if "sampling" in info.features:
        assert len({tuple(tokens) for tokens in samples}) == (1 if temperature == 0 else 3)
        again = await collect(engine, ask(sampling=sampling))
        assert [tokens_of(again, index) for index in range(3)] == samples


async def test_abort_ends_all_samples(start: Start) -> None:
    engine, info = await start()
    need(info, "n")
    with slow_steps():
        stream = engine.generate(ask("gone", sampling=SamplingParams(n=3, max_tokens=None, ignore_eos=True)))
        await anext(stream)
        assert await engine.abort("gone")
    rest = [chunk async for chunk in stream]
    assert {chunk.index for chunk in rest if chunk.finish_reason == "abort"} == {0, 1, 2}
    assert rest[-1].usage is not None
    stats = await engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.num_blocks, 0, 0)


async def test_the_best_come_back_best_first(start: Start) -> None:
    engine, info = await start()
    need(info, "best_of", "logprobs")
    sampling = SamplingParams(n=2, best_of=5, seed=1, logprobs=0, max_tokens=6, ignore_eos=True)
    all_five = SamplingParams(n=5, seed=1, logprobs=0, max_tokens=6, ignore_eos=True)

    def means(chunks: list[GenChunk], count: int) -> list[float]:
        kept = [[each.logprob for c in chunks if c.index == i for each in c.logprobs or ()] for i in range(count)]
        return [sum(logprobs) / len(logprobs) for logprobs in kept]

    best = await collect(engine, ask(sampling=sampling))
    assert {chunk.index for chunk in best} == {0, 1}
    assert best[-1].usage is not None
    assert best[-1].usage.completion_tokens == 30
    ranked = sorted(means(await collect(engine, ask(sampling=all_five)), 5), reverse=True)
    assert means(best, 2) == pytest.approx(ranked[:2], abs=1e-4)


async def test_min_tokens_puts_off_the_end(start: Start) -> None:
    engine, info = await start()
    need(info, "min_tokens")
    stop = tokens_of(await collect(engine, ask()))[2]
    sampling = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(stop,), min_tokens=7, max_tokens=30)
    assert len(tokens_of(await collect(engine, ask(sampling=sampling)))) >= 7


async def test_logprobs_come_with_their_tokens(start: Start) -> None:
    engine, info = await start()
    need(info, "logprobs")
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, logprobs=1)
    for chunk in await collect(engine, ask(sampling=sampling)):
        assert chunk.logprobs is not None
        assert [each.token_id for each in chunk.logprobs] == chunk.token_ids
        for each in chunk.logprobs:
            assert each.logprob <= 0.0
            assert (each.rank, each.top) == (1, ((each.token_id, each.logprob),))


STRUCTURES = [  # finite ones: a random model would never come to the end of a number
    (Structured("json_schema", '{"enum": ["red", "green", [1, {"deep": null}]]}'), json.loads),
    (Structured("regex", "[0-9]{3}-[a-f]{2}"), re.compile("[0-9]{3}-[a-f]{2}").fullmatch),
    (Structured("choice", ("yes", "no")), ("yes", "no").index),
]


@pytest.mark.parametrize(("structured", "check"), STRUCTURES, ids=[each.kind for each, _ in STRUCTURES])
async def test_structured_output_is_what_was_asked_for(
    start: Start, structured: Structured, check: Callable[[str], object]
) -> None:
    engine, info = await start()
    need(info, "structured")
    sampling = SamplingParams(structured=structured, seed=4, max_tokens=60, temperature=0.7)
    strict, free = await asyncio.gather(collect(engine, ask("strict", sampling=sampling)), collect(engine, ask("free")))
    assert strict[-1].finish_reason == "stop"
    assert check(text_of(strict)) is not None
    assert len(tokens_of(free)) == 10


async def test_drain_lets_those_in_flight_end_and_takes_no_more(start: Start) -> None:
    engine, _ = await start()
    stream = engine.generate(ask("in flight"))
    await anext(stream)

    async def rest() -> list[GenChunk]:
        return [chunk async for chunk in stream]

    reading = asyncio.create_task(rest())
    assert await engine.drain(timeout_s=60)
    assert (await reading)[-1].finish_reason == "length"
    with pytest.raises(OverloadedError):
        await collect(engine, ask("late"))


async def test_shutdown_ends_every_stream_and_can_be_repeated(start: Start) -> None:
    engine, _ = await start(max_running=2)
    readings = [asyncio.create_task(collect(engine, ask(f"r{i}", sampling=ENDLESS))) for i in range(4)]
    await asyncio.sleep(0)
    await engine.shutdown()
    await engine.shutdown()
    results = await asyncio.gather(*readings, return_exceptions=True)
    ended = [result[-1].finish_reason if isinstance(result, list) else type(result).__name__ for result in results]
    assert set(ended) <= {"abort", "length", "OverloadedError", "EngineError", "EngineDeadError"}
