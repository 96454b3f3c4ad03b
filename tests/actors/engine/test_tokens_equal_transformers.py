import random
from pathlib import Path

import pytest
import torch
from tests.actors.engine.tiny import SHAPES, VOCAB, save_llama
from transformers import LlamaForCausalLM

from raytide.actors.engine import LLM, SamplingParams

NEW_TOKENS = 16
TIE = 1e-4


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 90))] for _ in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reference_ops", [False, True], ids=["fast", "ref"])
def test_greedy_tokens_are_those_of_transformers(
    shape: str, reference_ops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reference_ops:
        for name in ("ATTENTION", "LINEAR", "RMS_NORM"):
            monkeypatch.setenv(f"RAYTIDE_OP_{name}", "ref")
    reference = save_llama(tmp_path, **SHAPES[shape])
    llm = LLM(tmp_path)
    answers = llm.generate(prompts(20), SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    different = [
        answer for answer in answers if not _agrees(reference, answer.prompt_token_ids, answer.outputs[0].token_ids)
    ]
    assert not different


def _agrees(reference: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> bool:
    """Each token is the reference's choice, up to the first place where its top two logits are a tie."""
    assert len(tokens) == NEW_TOKENS
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for row, token in zip(logits, tokens, strict=True):
        best = row.topk(2)
        if token != best.indices[0]:
            return bool(best.values[0] - best.values[1] < TIE)
    return True


def test_prompt_logits_are_those_of_transformers(tmp_path: Path) -> None:
    reference, prompt = save_llama(tmp_path), [5, 6, 7, 8] * 20
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (LLM(tmp_path).logits(prompt) - expected).abs().max() < 1e-4


def test_sharded_files_give_the_same_tokens(tmp_path: Path) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_llama(whole)
    save_llama(sharded, max_shard_size="100KB")
    assert (sharded / "model.safetensors.index.json").exists()
    sampling = SamplingParams(temperature=0, max_tokens=8)
    tokens = [LLM(path).generate([[5, 6, 7]], sampling)[0].outputs[0].token_ids for path in (whole, sharded)]
    assert tokens[0] == tokens[1]


def test_bfloat16_stays_close_to_float32(model_dir: Path) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=1)
    wide = LLM(model_dir).generate(prompts(20), sampling)
    narrow = LLM(model_dir, dtype="bfloat16").generate(prompts(20), sampling)
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(wide, narrow, strict=True))
    assert same >= 14
