"""The thread of an engine core: commands between steps, and no step left out."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from raytide.actors.engine import EngineConfig, GenRequest, NativeEngine, SamplingParams


async def test_a_request_that_arrives_with_the_end_of_all_others_is_computed(model_dir: Path) -> None:
    """Both commands wait for the same turn: after the first the engine has no work, after the second it has some."""
    engine = NativeEngine(EngineConfig(model_dir=str(model_dir)))
    await engine.start()
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    running = engine.generate(GenRequest(request_id="old", prompt=[5, 6, 7], sampling=endless))
    await anext(running)
    held, going = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        held.set()
        going.wait(60)

    holding = engine._call(hold)
    await asyncio.to_thread(held.wait, 60)
    aborting = asyncio.ensure_future(engine.abort("old"))
    short = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    new = engine.generate(GenRequest(request_id="new", prompt=[5, 6, 7], sampling=short))
    first = asyncio.ensure_future(anext(new))
    assert engine._thread is not None
    async with asyncio.timeout(60):
        while engine._thread.pending_commands != 3:  # noqa: ASYNC110 (the hold, the abort, the new request)
            await asyncio.sleep(0.001)
    going.set()
    assert (await asyncio.wait_for(first, 60)).token_ids
    await asyncio.gather(holding, aborting)
    await engine.shutdown()
