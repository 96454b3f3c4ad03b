"""In deterministic mode every logit is the same to the bit, whatever runs beside a request, however its work is cut."""

import random
from pathlib import Path

import pytest
import torch
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine import EngineConfig, GenRequest, SamplingParams, operations
from raytide.actors.engine.kv_transfer import export_kv, import_kv
from raytide.actors.engine.loop import EngineLoop
from raytide.actors.engine.runner import Runner
from raytide.actors.engine.sequence import Chunk

RNG = random.Random(3)
PROMPTS = [[RNG.randrange(1, VOCAB) for _ in range(length)] for length in (1, 7, 16, 17, 40, 75, 23, 33)]
PARAMS = SamplingParams(temperature=0.7, seed=9, max_tokens=10, ignore_eos=True)
Logits = dict[tuple[int, ...], torch.Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """The logits that followed each context."""
    found: Logits = {}
    logits = Runner.logits

    def watched(self: Runner, chunks: list[Chunk], more_rows: list[int]) -> torch.Tensor:
        rows = logits(self, chunks, more_rows)
        for seq, row in zip([chunk.seq for chunk in chunks if chunk.samples], rows, strict=False):
            context = tuple(seq.tokens)
            assert context not in found or torch.equal(found[context], row), f"after {len(context)} tokens"
            found[context] = row.clone()
        return rows

    monkeypatch.setattr(Runner, "logits", watched)
    return found


def start(model_dir: Path, dtype: str, **options: object) -> EngineLoop:
    fields = {"model_dir": str(model_dir), "dtype": dtype, "block_size": 16, "deterministic": True}
    return EngineLoop(EngineConfig.parse(fields | options, where="test"))


def run(loop: EngineLoop, order: list[int]) -> None:
    for index in order:
        loop.add(GenRequest(request_id=f"r{index}", prompt=PROMPTS[index], sampling=PARAMS), PROMPTS[index])
    while loop.has_work:
        loop.step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_logit_is_the_same_to_the_bit(model_dir: Path, dtype: str, seen: Logits) -> None:
    everyone = list(range(len(PROMPTS)))
    for index in everyone:
        run(start(model_dir, dtype, prefix_cache=False), [index])
    alone = len(seen)
    assert alone == 10 * len(PROMPTS)
    for options in (
        {},
        {"block_size": 4, "max_batch_tokens": 5, "max_running": 4},
        {"max_batch_tokens": 33, "max_running": 3},
        {"block_size": 4, "num_blocks": 30, "max_model_len": 100},
    ):
        loop = start(model_dir, dtype, **options)
        run(loop, random.Random(1).sample(everyone, len(everyone)))
        run(loop, everyone)
        assert (loop.stats().preemptions > 0) == ("num_blocks" in options)
        assert loop.stats().cached_tokens > 0
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
