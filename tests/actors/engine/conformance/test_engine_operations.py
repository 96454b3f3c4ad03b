"""Every engine keeps these promises as a whole: pauses, sleep, weights, adapters, transfers, order. A test is skipped
only where the feature is not declared.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

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
    tokens_of,
)

from raytide.actors.engine import GenChunk, SamplingParams
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.base import Engine
from raytide.actors.engine.types import Feature
from raytide.core.errors import ConflictError, RaytideError, UsageError

# One event loop for all: vLLM belongs to the one it was started on.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = Path(__file__).resolve().parents[4] / "docs" / "engine.md"
NEVER = 0.05  # of something that must not happen: too short can only hide a failure, not make one


def reading(
    engine: Engine, name: str, sampling: SamplingParams = GREEDY, **more: object
) -> asyncio.Task[list[GenChunk]]:
    return asyncio.create_task(collect(engine, ask(name, sampling=sampling, **more)))


async def test_a_paused_engine_keeps_its_requests_and_takes_new_ones(start: Start) -> None:
    engine, info = await start()
    need(info, "pause")
    alone = tokens_of(await collect(engine, ask(sampling=ENDLESS)))
    with slow_steps():
        stream = engine.generate(ask("before", sampling=ENDLESS))
        chunks = [await anext(stream)]
        await engine.pause()
    await engine.pause()
    steps = (await engine.stats()).steps
    during = reading(engine, "during", sampling=ENDLESS)
    done, _ = await asyncio.wait([during], timeout=NEVER)
    stats = await engine.stats()
    assert not done
    assert (stats.steps, stats.state, stats.running + stats.waiting) == (steps, "paused", 2)
    await engine.resume()
    await engine.resume()
    chunks += [chunk async for chunk in stream]
    assert tokens_of(chunks) == tokens_of(await during) == alone
    assert (await engine.stats()).state == "serving"


async def test_a_paused_engine_lets_a_request_go(start: Start) -> None:
    engine, info = await start()
    need(info, "pause")
    with slow_steps():
        stream = engine.generate(ask("gone", sampling=ENDLESS))
        await anext(stream)
        await engine.pause()
    assert await engine.abort("gone")
    assert [chunk async for chunk in stream][-1].finish_reason == "abort"
    stats = await engine.stats()
    assert (stats.free_blocks, stats.running) == (stats.num_blocks, 0)


@pytest.mark.parametrize("level", [1, 2])
async def test_requests_sleep_with_the_engine_and_wake_with_it(start: Start, level: int) -> None:
    engine, info = await start()
    need(info, "sleep")
    alone = tokens_of(await collect(engine, ask()))
    with slow_steps():
        stream = engine.generate(ask("asleep"))
        chunks = [await anext(stream)]
        await engine.sleep(level)  # type: ignore[arg-type]
    assert (await engine.stats()).state == "asleep"
    with pytest.raises(ConflictError, match="sleeps"):
        await engine.resume()
    late = reading(engine, "late")
    await engine.wake()
    await engine.wake()
    chunks += [chunk async for chunk in stream]
    assert tokens_of(chunks) == tokens_of(await late) == alone


async def test_new_weights_have_their_version(start: Start, model_dir: Path) -> None:
    engine, info = await start()
    need(info, "weights_swap")
    assert info.weights_version
    with slow_steps():
        stream = engine.generate(ask("running", sampling=ENDLESS))
        await anext(stream)
        assert await engine.load_weights(str(model_dir), "step-7") == "step-7"
    assert len([chunk async for chunk in stream]) > 1
    assert await engine.cached_prefix(PROMPT) == 0 or "prefix_cache" in info.features


async def test_an_exported_request_goes_on_elsewhere_with_the_very_next_token(start: Start) -> None:
    here, info = await start()
    need(info, "kv_transfer")
    there, _ = await start()
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone = tokens_of(await collect(here, ask(sampling=sampling)))
    with slow_steps():
        stream = here.generate(ask("moving", sampling=sampling))
        first = [await anext(stream)]
        handle = await here.export_kv("moving")
    first += [chunk async for chunk in stream]
    assert first[-1].finish_reason == "abort"
    rest = [
        chunk
        async for chunk in there.import_kv(type(handle).from_bytes(handle.to_bytes()), ask("r", sampling=sampling))
    ]
    assert tokens_of(first) + tokens_of(rest) == alone
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == 40
    stats = await here.stats()
    assert (stats.free_blocks, stats.running) == (stats.num_blocks, 0)


async def test_kv_of_other_weights_is_refused(start: Start, model_dir: Path) -> None:
    engine, info = await start()
    need(info, "kv_transfer", "weights_swap")
    with slow_steps():
        stream = engine.generate(ask("moving", sampling=ENDLESS))
        await anext(stream)
        handle = await engine.export_kv("moving")
    assert [chunk async for chunk in stream][-1].finish_reason == "abort"
    await engine.load_weights(str(model_dir), "other")
    with pytest.raises(ConflictError, match="weights_version"):
        [chunk async for chunk in engine.import_kv(handle, ask("r", sampling=ENDLESS))]
    with pytest.raises(RaytideError):
        await engine.export_kv("nobody")


async def test_the_first_in_line_is_the_lowest_priority_number(start: Start) -> None:
    engine, info = await start(max_running=1)
    need(info, "priority", "pause")
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        await collect(engine, ask(name, priority=priority))
        order.append(name)

    first = engine.generate(ask("first", sampling=ENDLESS, priority=-1))
    await anext(first)
    await engine.pause()  # else it may end before the others are in line
    waiting = [asyncio.create_task(wait(name, priority)) for name, priority in [("low", 9), ("mid", 5), ("high", 0)]]
    while (await engine.stats()).waiting < 3:  # noqa: ASYNC110 (the protocol tells of it no other way)
        await asyncio.sleep(0)
    with slow_steps(0.05):  # else a request that is let in early may end before the more urgent ones are let in
        await engine.resume()
        await engine.abort("first")
        async for _ in first:
            pass
        await asyncio.gather(*waiting)
    assert order == ["high", "mid", "low"]


async def test_cached_prefix_says_what_a_prompt_would_find(start: Start) -> None:
    engine, info = await start()
    need(info, "prefix_cache")
    if info.backend == "vllm":
        pytest.skip("vLLM does not tell what its prefix cache holds")
    prompt = list(range(1, 60))
    assert await engine.cached_prefix(prompt) == 0
    await collect(engine, ask("first", prompt))
    expected = await engine.cached_prefix(prompt)
    again = (await collect(engine, ask("again", prompt)))[-1].usage
    salted = (await collect(engine, ask("salted", prompt, cache_salt="other tenant")))[-1].usage
    assert again is not None
    assert salted is not None
    assert again.cached_tokens == expected > 0
    assert salted.cached_tokens == 0


async def test_an_adapter_serves_those_that_name_it(start: Start, adapter_dir: Path) -> None:
    engine, info = await start()
    need(info, "lora")
    with pytest.raises(RaytideError, match="not loaded"):
        await collect(engine, ask(lora="tuned"))
    base = tokens_of(await collect(engine, ask()))
    await engine.load_lora("tuned", str(adapter_dir))
    with pytest.raises(ConflictError, match="tuned"):
        await engine.load_lora("tuned", str(adapter_dir))
    names = [None, "tuned", None, "tuned"]
    answers = await asyncio.gather(*(collect(engine, ask(f"r{i}", lora=name)) for i, name in enumerate(names)))
    tokens = [tokens_of(chunks) for chunks in answers]
    assert tokens[0] == tokens[2] == base
    assert tokens[1] == tokens[3]
    assert tokens[1] != base or info.backend == "fake"
    with slow_steps():
        stream = engine.generate(ask("using", sampling=ENDLESS, lora="tuned"))
        await anext(stream)
        with pytest.raises(ConflictError, match="tuned"):
            await engine.unload_lora("tuned")
        await stream.aclose()  # type: ignore[attr-defined]
    await engine.unload_lora("tuned")
    with pytest.raises(RaytideError, match="not loaded"):
        await engine.unload_lora("tuned")


async def test_embeddings_have_length_one_and_depend_on_the_text(start: Start) -> None:
    engine, info = await start()
    need(info, "embeddings")
    one, same, other = await engine.embed(["import os", await engine.tokenize("import os"), "def main():"])
    assert sum(each * each for each in one) == pytest.approx(1.0, abs=1e-3)
    assert one == pytest.approx(same, abs=1e-4)
    assert one != pytest.approx(other, abs=1e-2)


OPTIONAL: dict[Feature, Callable[[Engine], Awaitable[object]]] = {
    "pause": lambda engine: engine.pause(),
    "sleep": lambda engine: engine.sleep(1),
    "weights_swap": lambda engine: engine.load_weights("x"),
    "lora": lambda engine: engine.load_lora("a", "x"),
    "embeddings": lambda engine: engine.embed(["x"]),
    "classification": lambda engine: engine.classify(["x"]),
    "kv_transfer": lambda engine: engine.export_kv("x"),
}
ASKING: dict[Feature, dict[str, object]] = {
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "logprobs": {"logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "bad_words": {"bad_words": ["a"]},
    "min_tokens": {"min_tokens": 2},
    "penalties": {"presence_penalty": 1.0},
    "stop_strings": {"stop": "a"},
}


async def test_what_is_not_declared_is_refused_by_name(start: Start) -> None:
    engine, info = await start()
    for feature, call in OPTIONAL.items():
        if feature not in info.features:
            with pytest.raises(UsageError, match=feature):
                await call(engine)
    for feature, params in ASKING.items():
        if feature not in info.features:
            with pytest.raises(UsageError, match=r"does not support"):
                await collect(engine, ask(sampling=SamplingParams(temperature=0, **params)))  # type: ignore[arg-type]
    assert (await collect(engine, ask()))[-1].finish_reason == "length"


async def test_the_page_says_what_each_engine_offers(start: Start) -> None:
    engine, info = await start()
    column = {"native": 1, "vllm": 2, "fake": 3}[info.backend]
    rows = [re.split(r" *\| *", line.strip("| \n")) for line in PAGE.open() if line.startswith("| `")]
    cells = {row[0].strip("`"): row[column] for row in rows if len(row) == 4}
    assert set(cells) == set(get_args(Feature))
    left_out = {"kv_transfer"} if isinstance(engine, RemoteEngine) else set()
    assert {name for name, cell in cells.items() if cell == "yes"} - left_out <= info.features
    assert info.features <= {name for name, cell in cells.items() if cell != "no"}
