"""An engine whose keys and values are rounded to int8 gives the same tokens in every condition, in half the memory."""

from pathlib import Path

import pytest
from tests.actors.engine.backends.test_kv_transfer import GREEDY, PROMPT, ask, run, start

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.engine.backends.native.operations import export_kv, import_kv
from raytide.actors.engine.kv_cache.handle import KvHandle
from raytide.actors.engine.model.model_runner import ModelRunner
from raytide.actors.engine.scheduler.preemption import SwapCost
from raytide.core.errors import ConflictError

PROMPTS = [[(11 * i + j) % 90 + 1 for j in range(18 + 5 * i)] for i in range(5)]
SAMPLED = SamplingParams(max_tokens=14, temperature=0.8, seed=3, ignore_eos=True, logprobs=1)
SMALL = {"num_blocks": 26, "max_model_len": 100}
CONDITIONS: dict[str, dict[str, object]] = {
    "prefix cache": {},
    "chunks": {"max_batch_tokens": 9, "max_running": 9},
    "recompute": SMALL,
    "swap": SMALL | {"host_memory_gb": 0.02},
    "speculation": {"speculation": "ngram"},
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_request_is_answered_as_alone(condition: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"block_size": 4, "kv_dtype": "int8", "deterministic": True}
    alone = LLM(model_dir, prefix_cache=False, **common)  # type: ignore[arg-type]
    expected = [alone.generate([prompt], SAMPLED)[0] for prompt in PROMPTS]
    monkeypatch.setattr(ModelRunner, "swap_cost", lambda self: SwapCost(0.01) if condition == "swap" else None)
    busy = LLM(model_dir, **(common | CONDITIONS[condition]))  # type: ignore[arg-type]
    for _ in ("cold", "warm"):
        found = busy.generate(PROMPTS, SAMPLED)
        assert [each.outputs for each in found] == [each.outputs for each in expected]
    stats = busy.stats()
    assert (stats.free_blocks, stats.failed) == (stats.num_blocks, 0)
    assert stats.preemptions > 0 if "num_blocks" in CONDITIONS[condition] else stats.cached_tokens > 0


def test_two_members_give_the_tokens_of_one(model_dir: Path) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    found = []
    for size in (1, 2):
        llm = LLM(model_dir, tensor_parallel=size, block_size=4, kv_dtype="int8", **SMALL)  # type: ignore[arg-type]
        found.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, greedy)])
        llm.close()
    assert found[0] == found[1]


def test_rounding_changes_little_and_takes_less_memory(model_dir: Path) -> None:
    plain, rounded = (start(model_dir, kv_dtype=each, kv_memory_gb=2e-4) for each in ("auto", "int8"))
    arch = plain.runner.arch
    numbers, codes = 4 * arch.head_dim, arch.head_dim + 4
    assert [each // codes for each in rounded.runner.cache.block_bytes] == [
        each // numbers for each in plain.runner.cache.block_bytes
    ]
    assert rounded.runner.cache.num_blocks == pytest.approx(plain.runner.cache.num_blocks * numbers / codes, abs=2)
    logits = [core.runner.prompt_logits(PROMPT) for core in (plain, rounded)]
    assert 0 < (logits[0] - logits[1]).abs().mean() < 0.03 * logits[0].abs().mean()


def test_a_request_moves_between_engines_that_round_alike(model_dir: Path) -> None:
    whole, here, there, other = (start(model_dir, kv_dtype=each) for each in ("int8", "int8", "int8", "auto"))
    whole.add(ask(), PROMPT)
    tokens, _, _ = run(whole)
    here.add(ask(), PROMPT)
    first, _, _ = run(here, 7)
    handle = KvHandle.from_bytes(export_kv(here, "r").to_bytes())
    here.drain_outputs()
    with pytest.raises(ConflictError, match="rounded to int8"):
        import_kv(other, handle, ask(), PROMPT)
    import_kv(there, handle, ask(), PROMPT)
    rest, _, _ = run(there)
    assert (first + rest, len(tokens)) == (tokens, GREEDY.max_tokens)
