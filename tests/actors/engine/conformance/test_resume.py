"""A stream that was cut goes on in another engine as if nothing had happened: every engine that declares "resume"."""

import asyncio

import pytest
from tests.actors.engine.conformance.asking import (
    ENDLESS,
    GREEDY,
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

from raytide.actors.engine import GenChunk, GenRequest, SamplingParams
from raytide.actors.engine.base import StreamProgress
from raytide.actors.engine.types import SampleProgress
from raytide.core.errors import UsageError

# One event loop for all: vLLM belongs to the one it was started on.
pytestmark = pytest.mark.asyncio(loop_scope="session")


def cut(request: GenRequest, chunks: list[GenChunk]) -> GenRequest:
    progress = StreamProgress(request)
    for chunk in chunks:
        progress.add(chunk)
    return progress.resumed()


def same(found: list[GenChunk], whole: list[GenChunk]) -> None:
    """Asserts that a client has the same in the end: text, tokens, finish reasons and usage."""
    for index in {chunk.index for chunk in whole}:
        mine, theirs = ([chunk for chunk in each if chunk.index == index] for each in (found, whole))
        assert tokens_of(mine, index) == tokens_of(theirs, index)
        assert text_of(mine) == text_of(theirs)
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == [theirs[-1].finish_reason]
    bill, expected = found[-1].usage, whole[-1].usage
    assert bill is not None
    assert expected is not None
    assert (bill.prompt_tokens, bill.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)
    assert bill.cached_tokens <= bill.prompt_tokens
    assert [chunk.usage for chunk in found[:-1]] == [None] * (len(found) - 1)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"stop": True}, id="stop string"),
        pytest.param({"stop": True, "min_tokens": 5, "include_stop_str_in_output": True}, id="stop string that stays"),
        pytest.param({"n": 3}, id="three samples"),
        pytest.param({"logprobs": 1}, id="logprobs"),
    ],
)
async def test_it_goes_on_from_any_chunk_and_can_be_cut_again(start: Start, params: dict[str, object]) -> None:
    here, info = await start()
    need(info, "resume")
    there, _ = await start()
    if "stop" in params:
        need(info, "stop_strings", "min_tokens")
        params = params | {"stop": text_of(await collect(here, ask()))[5:9]}
    need(info, *{"n", "logprobs"} & set(params))  # type: ignore[arg-type]
    request = ask(sampling=SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, **params))  # type: ignore[arg-type]
    whole = await collect(here, request)
    for at in range(len(whole)):
        rest = await collect(there, cut(request, whole[:at]))
        same(whole[:at] + rest, whole)
        if len(rest) > 1:
            same(whole[:at] + rest[:1] + await collect(here, cut(request, whole[:at] + rest[:1])), whole)
        assert all((chunk.logprobs is not None) == ("logprobs" in params) for chunk in rest)
    stats = await there.stats()
    assert (stats.free_blocks, stats.running, stats.failed) == (stats.num_blocks, 0, 0)


async def test_many_are_resumed_at_once_among_others(start: Start) -> None:
    here, info = await start()
    need(info, "resume")
    there, _ = await start(max_running=16)
    whole = await collect(here, ask())
    cuts = [cut(ask(f"r{at}"), whole[:at]) for at in range(len(whole))]
    others = [collect(there, ask(f"other{i}", [i + 1] * (i + 1))) for i in range(6)]
    answers = await asyncio.gather(*(collect(there, each) for each in cuts), *others)
    for at, rest in enumerate(answers[: len(whole)]):
        same(whole[:at] + rest, whole)


async def test_it_counts_as_its_own_only_the_tokens_that_it_makes(start: Start) -> None:
    engine, info = await start()
    need(info, "resume")
    whole = await collect(engine, ask())
    before = (await engine.stats()).generated_tokens
    at = len(whole) // 2
    rest = await collect(engine, cut(ask(), whole[:at]))
    assert (await engine.stats()).generated_tokens - before == len(tokens_of(rest)) < len(tokens_of(whole))


async def test_a_resumed_request_can_be_aborted(start: Start) -> None:
    engine, info = await start()
    need(info, "resume", "n")
    done = SampleProgress(tuple(tokens_of(await collect(engine, ask()))), "stop")
    half = SampleProgress(done.token_ids[:5])
    sampling = SamplingParams(temperature=0, n=3, max_tokens=None, ignore_eos=True)
    with slow_steps():
        stream = engine.generate(ask("gone", sampling=sampling, resume=(done, half)))
        first = await anext(stream)
        assert await engine.abort("gone")
    rest = [first] + [chunk async for chunk in stream]
    assert {chunk.index for chunk in rest if chunk.finish_reason == "abort"} == {1, 2}
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == 15 + sum(len(chunk.token_ids) for chunk in rest)
    stats = await engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.num_blocks, 0, 0)


@pytest.mark.parametrize(
    ("sampling", "resume", "why"),
    [
        (GREEDY, [SampleProgress((7,) * 10)], "sample 0 is complete"),
        (ENDLESS, [SampleProgress((7,) * (MAX_LEN - len(PROMPT)))], "sample 0 is complete"),
        (GREEDY, [SampleProgress((7, 10**6))], "a token id is outside"),
        (GREEDY, [SampleProgress((-1,))], "a token id is outside"),
        (GREEDY, [SampleProgress((7,)), SampleProgress((7,))], "2 samples, but n is 1"),
        (GREEDY, [SampleProgress((7,), "stop")], "all samples have ended"),
        (SamplingParams(best_of=2), [SampleProgress((7,))], "best_of streams nothing"),
    ],
)
async def test_progress_that_does_not_fit_is_refused(
    start: Start, sampling: SamplingParams, resume: list[SampleProgress], why: str
) -> None:
    engine, info = await start()
    need(info, "resume")
    with pytest.raises(UsageError, match=why):
        await collect(engine, ask(sampling=sampling, resume=tuple(resume)))
    assert (await collect(engine, ask()))[-1].finish_reason == "length"


async def test_progress_behind_its_end_is_refused(start: Start) -> None:
    engine, info = await start()
    need(info, "resume", "stop_strings")
    free = await collect(engine, ask())
    tokens, text = tokens_of(free), text_of(free)
    progress = (SampleProgress(tuple(tokens[:9])),)
    ends = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(tokens[4],))
    with pytest.raises(UsageError, match="sample 0 is complete"):
        await collect(engine, ask(sampling=ends, resume=progress))
    stops = SamplingParams(temperature=0, ignore_eos=True, stop=(text[2:5],))
    with pytest.raises(UsageError, match="sample 0 is complete"):
        await collect(engine, ask(sampling=stops, resume=progress))
    stats = await engine.stats()
    assert (stats.free_blocks, stats.running, stats.waiting) == (stats.num_blocks, 0, 0)
