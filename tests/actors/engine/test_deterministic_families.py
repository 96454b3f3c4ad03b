"""A deterministic engine, for each family: logits equal to the bit, however the work on a sequence is cut."""

import random
from collections.abc import Iterator

import pytest
import torch
from tests.actors.engine.families import FAMILIES, save_family
from tests.actors.engine.model.test_lora import write_adapter
from tests.actors.engine.tiny import VOCAB

from raytide.actors.engine import SamplingParams
from raytide.actors.engine.config import EngineConfig
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.sequence import ScheduledChunk, Sequence
from raytide.actors.models.families import read_architecture


@pytest.fixture(scope="module", params=FAMILIES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp(request.param)
    model = save_family(path, request.param)
    options = {"dtype": "float32", "deterministic": True, "block_size": 16, "max_model_len": 128}
    made = ModelRunner(EngineConfig.parse({"model_dir": str(path), **options}, where="test"), read_architecture(path))
    made.load_lora("a", write_adapter(path / "adapter", model, ["o_proj", "attn.c_proj"], rank=5))
    return made


def sequences(loras: list[str | None]) -> Iterator[Sequence]:
    rng = random.Random(8)
    for row, lora in enumerate(loras):
        tokens = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 100))]
        blocks = list(range(row * 8, row * 8 + 8))
        yield Sequence(
            f"s{row}", tokens, len(tokens), SamplingParams(), 128, frozenset(), 0, block_ids=blocks, lora=lora
        )


def logits(runner: ModelRunner, seq: Sequence, cuts: list[int]) -> torch.Tensor:
    """Returns the logits of the last token, with the tokens computed in chunks that end at the cuts."""
    ends = sorted({cut for cut in cuts if 0 < cut < len(seq.tokens)} | {len(seq.tokens)})
    starts = [0, *ends[:-1]]
    last = [runner.logits([ScheduledChunk(seq, start, end - start)]) for start, end in zip(starts, ends, strict=True)][
        -1
    ]
    runner.release(seq)
    return last[0]


def test_alone_batched_and_chunked_are_equal_to_the_bit(runner: ModelRunner) -> None:
    seqs = list(sequences([None, "a", None, "a", "a", None, None]))
    together = runner.logits([ScheduledChunk(seq, 0, len(seq.tokens)) for seq in seqs])
    for seq in seqs:
        runner.release(seq)
    for row, seq in zip(together, seqs, strict=True):
        assert torch.equal(logits(runner, seq, []), row)
        assert torch.equal(logits(runner, seq, [1, 16, 40, len(seq.tokens) - 1]), row)
