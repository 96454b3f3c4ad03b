"""Each family's logits and greedy tokens, against transformers on the same random weights."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.engine.families import FAMILIES, save_family
from tests.actors.engine.tiny import VOCAB, save_llama

from raytide.actors.engine import LLM, SamplingParams

MAX_LEN = 128
NEW_TOKENS = 12
TIE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


def prompts(count: int, longest: int = 110) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model directory, and the transformers model that was written there."""
    path = tmp_path_factory.mktemp(request.param)
    return path, save_family(path, request.param)


@pytest.fixture(params=["fast", "ref"])
def llm(saved: tuple[Path, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LLM:
    if request.param == "ref":
        monkeypatch.setenv("RAYTIDE_OPS", "ref")
    return LLM(saved[0], max_model_len=MAX_LEN)


def logits_of(reference: Any, rows: list[list[int]]) -> torch.Tensor:
    """[B, T, V], padded on the right, which causal attention never sees."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    with torch.inference_mode():
        logits: torch.Tensor = reference(ids).logits
    return logits


def test_logits_are_those_of_transformers(saved: tuple[Path, Any], llm: LLM) -> None:
    prompt = prompts(1)[0] * 9
    expected = logits_of(saved[1], [prompt[:100]])[0]
    assert (llm.logits(prompt[:100]) - expected).abs().max() < 1e-4


def test_greedy_tokens_are_those_of_transformers(saved: tuple[Path, Any], llm: LLM) -> None:
    """Each is the reference's choice, up to the first place where its top two logits are a tie."""
    answers = llm.generate(prompts(50), GREEDY)
    rows = [answer.prompt_token_ids + answer.outputs[0].token_ids for answer in answers]
    all_logits, ties = logits_of(saved[1], rows), 0
    for answer, row, logits in zip(answers, rows, all_logits, strict=True):
        best = logits[len(answer.prompt_token_ids) - 1 : len(row) - 1].topk(2)
        assert len(answer.outputs[0].token_ids) == NEW_TOKENS
        other = best.indices[:, 0] != torch.tensor(answer.outputs[0].token_ids)
        if other.any():
            first = int(other.nonzero()[0])
            assert best.values[first, 0] - best.values[first, 1] < TIE, f"prompt {answer.prompt_token_ids}"
            ties += 1
    print(f"{saved[0].name}: {ties} of {len(answers)} prompts first differ at a tie")  # noqa: T201 (the figure)
    assert ties <= 0.001 * len(answers)


def test_bfloat16_is_as_close_to_float32_as_transformers_bfloat16(saved: tuple[Path, Any]) -> None:
    """Compares medians over prompts: a token that rounding sends to another expert differs by much, on both sides."""
    path, reference = saved
    some = prompts(12)
    narrow = type(reference).from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    exact, theirs = (
        torch.cat([logits_of(model, [prompt])[0].float() for prompt in some]) for model in (reference, narrow)
    )
    llm = LLM(path, dtype="bfloat16", max_model_len=MAX_LEN)
    ours = torch.cat([llm.logits(prompt) for prompt in some])
    assert 0 < (ours - exact).abs().median() < 1.3 * (theirs - exact).abs().median()


# What each family's config turns on, and a value that turns it off.
FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("llama3-mqa", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    ("llama-linear-tied", {"rope_parameters": None}),
    ("mistral-window", {"sliding_window": None}),
    ("qwen2-yarn-windows", {"rope_parameters": None}),
    ("qwen2-yarn-windows", {"layer_types": ["full_attention"] * 3}),
    ("smollm3", {"sliding_window": None}),
    ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    ("gemma", {"hidden_act": "silu"}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 24}),
    ("gemma2", {"layer_types": ["full_attention"] * 3}),
    ("gemma3", {"sliding_window": None}),
    ("gemma3", {"rope_parameters": {}}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": False}),
    ("gpt2", {"activation_function": "silu"}),
    ("phi3-longrope", {"sliding_window": None}),
    ("mixtral", {"sliding_window": None}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("qwen3-moe", {"norm_topk_prob": False}),
]


@pytest.mark.parametrize(("family", "without"), FEATURES, ids=[f"{name}-{next(iter(off))}" for name, off in FEATURES])
def test_each_feature_bites_in_the_configs_above(family: str, without: dict[str, Any], tmp_path: Path) -> None:
    save_family(tmp_path, family)
    prompt, config = prompts(1)[0] * 9, tmp_path / "config.json"
    before = LLM(tmp_path, max_model_len=MAX_LEN).logits(prompt[:100])
    config.write_text(json.dumps(json.loads(config.read_text()) | without))
    after = LLM(tmp_path, max_model_len=MAX_LEN).logits(prompt[:100])
    assert (before - after).abs().max() > 1e-2


def test_longrope_uses_its_long_factors_when_sequences_may_outgrow_the_original_length(tmp_path: Path) -> None:
    reference = save_family(tmp_path, "phi3-longrope")
    prompt = (prompts(3)[2] * 200)[:150]
    llm = LLM(tmp_path)
    assert (llm.logits(prompt) - logits_of(reference, [prompt])[0]).abs().max() < 1e-4
    assert (llm.logits(prompt[:100]) - logits_of(reference, [prompt[:100]])[0]).abs().max() > 1e-2  # documented


def test_sharded_files_give_the_same_tokens(tmp_path: Path) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_llama(whole)
    save_llama(sharded, max_shard_size="100KB")
    assert (sharded / "model.safetensors.index.json").exists()
    tokens = [LLM(path).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids for path in (whole, sharded)]
    assert tokens[0] == tokens[1]
