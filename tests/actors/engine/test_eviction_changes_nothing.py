"""Evicted requests of the real engine finish with the tokens that they would have had, swapped or computed again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine import EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.types import GenChunk

PROMPTS = [[(7 * at + 13 * each) % (VOCAB - 1) + 1 for each in range(10 + at)] for at in range(6)]


def serve(model_dir: Path, tokens: dict[str, list[int]], **options: object) -> EngineCore:
    """Low requests first; once they run, high ones. Their tokens are put into `tokens`."""
    loop = EngineCore(EngineConfig.parse({"model_dir": str(model_dir), "block_size": 4, **options}, where="test"))
    for at, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.8, seed=at, max_tokens=24, ignore_eos=True, n=1 + (at == 0))
        loop.add(GenRequest(request_id=f"low{at}", prompt=[], sampling=sampling, priority=5), prompt)
    steps = 0
    while loop.has_work:
        if steps in (6, 12):
            sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            loop.add(GenRequest(request_id=f"high{steps}", prompt=[], sampling=sampling), PROMPTS[0][:9] * 3)
        for output in loop.step():
            assert isinstance(output, GenChunk)
            tokens.setdefault(f"{output.request_id}#{output.index}", []).extend(output.token_ids)
        steps += 1
    return loop


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("tokens_per_block", [0.01, 1e6, None], ids=["swap", "recompute", "as measured"])
def test_tokens_survive_eviction(
    tokens_per_block: float | None, prefix_cache: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: dict[str, list[int]] = {}
    serve(model_dir, alone)
    if tokens_per_block is not None:
        monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(tokens_per_block))
    swapped: dict[str, list[int]] = {}
    loop = serve(
        model_dir,
        swapped,
        num_blocks=40,
        max_running=5,
        host_memory_gb=0.01,
        prefix_cache=prefix_cache,
        max_model_len=96,
    )
    assert loop.scheduler.preemptions > 0
    assert swapped == alone
    loop.pool.check([], [])
