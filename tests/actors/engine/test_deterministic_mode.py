"""In deterministic mode every logit is the same to the bit, whatever runs beside a request, however its work is cut."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine import EngineConfig, GenRequest, SamplingParams
from raytide.actors.engine.backends.native import operations
from raytide.actors.engine.backends.native.engine_core import EngineCore
from raytide.actors.engine.backends.native.operations import export_kv, import_kv
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.actors.engine.sequence import ScheduledChunk, StepPlan

RNG = random.Random(3)
PROMPTS = [[RNG.randrange(1, VOCAB) for _ in range(length)] for length in (1, 7, 16, 17, 40, 75, 23, 33)]
PARAMS = SamplingParams(temperature=0.7, seed=9, max_tokens=10, ignore_eos=True)
Logits = dict[tuple[int, ...], torch.Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Logits]:
    """The logits that followed each context, which are compared with later ones: an engine would outlive an assertion
    in here, so that differences are counted and asserted on at the end.
    """
    found: Logits = {}
    guessed: list[tuple[int, ...]] = []  # contexts of right drafts
    different: list[tuple[int, ...]] = []
    logits = ModelRunner.logits

    def watched(self: ModelRunner, chunks: list[ScheduledChunk], more_rows: list[int]) -> torch.Tensor:
        rows = logits(self, chunks, more_rows)
        due = [(chunk, guesses) for chunk in chunks if chunk.yields_token for guesses in range(1 + len(chunk.draft))]
        for (chunk, guesses), row in zip(due, rows, strict=False):
            context = (*chunk.seq.tokens, *chunk.draft[:guesses])
            expected = found.get(context, row) if guesses else found.setdefault(context, row.clone())
            if not torch.equal(expected, row):
                different.append(context)
            guessed.extend([context] * (guesses > 0 and context in found))
        return rows

    monkeypatch.setattr(ModelRunner, "logits", watched)
    yield found
    assert different == []
    assert guessed


def start(model_dir: Path, dtype: str, **options: object) -> EngineCore:
    fields = {"model_dir": str(model_dir), "dtype": dtype, "block_size": 16, "deterministic": True}
    fields["speculation"] = "auto"
    return EngineCore(EngineConfig.parse(fields | options, where="test"))


def run(loop: EngineCore, order: list[int]) -> None:
    for index in order:
        loop.add(GenRequest(request_id=f"r{index}", prompt=PROMPTS[index], sampling=PARAMS), PROMPTS[index])
    while loop.has_work:
        loop.step()


def watch_swaps(loop: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Blocks that come back from the host, as they do."""
    back: list[tuple[int, int]] = []
    move = loop.runner.cache.move

    def watched(plan: StepPlan) -> None:
        back.extend(plan.swap_in)
        move(plan)

    monkeypatch.setattr(loop.runner.cache, "move", watched)
    return back


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_logit_is_the_same_to_the_bit(
    wide_model_dir: Path, dtype: str, seen: Logits, monkeypatch: pytest.MonkeyPatch, free_drafts: None
) -> None:
    """The model's heads are wide enough for the attention that is fast and not invariant."""
    model_dir = wide_model_dir
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01) if self.cache.num_host_blocks else None)
    everyone = list(range(len(PROMPTS)))
    for index in everyone:
        run(start(model_dir, dtype, prefix_cache=False, speculation="off"), [index])
    alone = len(seen)
    assert alone == 10 * len(PROMPTS)
    for options in (
        {},
        {"block_size": 4, "max_batch_tokens": 5, "max_running": 4},
        {"max_batch_tokens": 33, "max_running": 3},
        {"block_size": 4, "num_blocks": 30, "max_model_len": 100},
        {"block_size": 4, "num_blocks": 30, "max_model_len": 100, "host_memory_gb": 0.01},
    ):
        loop = start(model_dir, dtype, **options)
        swapped = watch_swaps(loop, monkeypatch)
        run(loop, random.Random(1).sample(everyone, len(everyone)))
        run(loop, everyone)
        assert (loop.stats().preemptions > 0) == ("num_blocks" in options)
        assert loop.stats().cached_tokens > 0
        assert bool(swapped) == ("host_memory_gb" in options)
    here, there = start(model_dir, dtype), start(model_dir, dtype)
    for index in everyone:
        request = GenRequest(request_id="r", prompt=PROMPTS[index], sampling=PARAMS)
        here.add(request, PROMPTS[index])
        for _ in range(index):
            here.step()
        import_kv(there, export_kv(here, "r"), request, PROMPTS[index])
        there.step()
        operations.sleep(there, 1)
        operations.wake(there)
        while there.has_work:
            there.step()
    assert len(seen) == alone, "the tokens differ"
