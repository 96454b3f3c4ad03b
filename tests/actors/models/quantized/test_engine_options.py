"""The engine's options change the inputs of quantized linears and the head. The rest is the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.actors.engine.tiny import save_llama
from tests.actors.models.quantized.quantized_models import PROMPT, Tensors, expected_logits, save_quantized

from raytide.actors.engine import LLM, SamplingParams
from raytide.actors.models.families import read_architecture
from raytide.core.errors import ConfigError
from raytide.kernels.core import round_to_nearest
from raytide.kernels.registry import ops_for

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}},
}


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rounded = round_to_nearest(weight, 8)
    return {"weight": rounded.codes_NK, "weight_scale": rounded.scales_NG}, rounded.dequantized()


def kl(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float(torch.nn.functional.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="batchmean"))


def test_rounded_inputs_and_head_stay_close_and_are_named(tmp_path: Path) -> None:
    model = save_quantized(tmp_path, int8, INT8, initializer_range=0.1)
    exact = LLM(tmp_path, quantized_input="float", quantized_head=False)
    fast = LLM(tmp_path, quantized_input="int8")
    assert exact.info.quantization == "compressed-tensors int8; computed with float inputs"
    assert fast.info.quantization == "compressed-tensors int8, head rounded to int8 g32; computed with int8 inputs"
    theirs = expected_logits(model)
    assert kl(exact.logits(PROMPT), theirs) < 1e-6
    assert 1e-6 < kl(fast.logits(PROMPT), theirs) < 0.02


def test_the_embedding_of_a_tied_head_is_not_rounded(tmp_path: Path) -> None:
    save_quantized(tmp_path, int8, INT8, tie_word_embeddings=True)
    llm = LLM(tmp_path)
    assert "head rounded to int8 g32" in llm.info.quantization
    plain = save_llama(tmp_path / "p", tie_word_embeddings=True, intermediate_size=128, head_dim=16).model.embed_tokens
    assert torch.equal(llm._core.runner._loaded._embedding, plain.weight)


def test_inputs_are_rounded_by_default_where_that_is_fast_and_the_model_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, int8, INT8)
    assert "int8 inputs" not in LLM(tmp_path).info.quantization
    monkeypatch.setattr("raytide.actors.engine.model.model_runner._INT8_PARAMETERS", 1)
    is_fast = "int8 inputs" in LLM(tmp_path).info.quantization
    assert is_fast == (ops_for("cpu").quantized_linear.__module__ == "raytide.kernels.quantized")


def test_a_plain_model_is_not_rounded(tmp_path: Path) -> None:
    model = save_llama(tmp_path)
    llm = LLM(tmp_path, quantized_input="int8", quantized_head=True)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
    assert llm.info.quantization == ""


@pytest.mark.parametrize("quantized_input", ["auto", "int8", "float"])
def test_a_deterministic_engine_s_answers_do_not_depend_on_the_batch(quantized_input: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, int8, INT8)
    llm = LLM(tmp_path, deterministic=True, quantized_input=quantized_input, block_size=32)
    prompts = [PROMPT, PROMPT[3:], PROMPT[5:] * 2, PROMPT[::-1]]
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1)
    together = llm.generate(prompts, params)
    for prompt, answer in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], params)
        assert alone.outputs[0].logprobs == answer.outputs[0].logprobs


def test_quantized_weights_are_not_trained(tmp_path: Path) -> None:
    from raytide.actors.trainer.hf.model_source import refuse_quantized

    save_quantized(tmp_path, int8, INT8)
    assert read_architecture(tmp_path).num_layers == 3
    with pytest.raises(ConfigError, match="cannot be trained"):
        refuse_quantized({"quantization_config": GPTQ}, "config.json")
