"""GGUF files against transformers with the weights that llama.cpp's `gguf` package reads from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.engine.tiny import save_llama
from tests.actors.models.quantized.gguf.gguf_files import save_gguf
from tests.actors.models.quantized.quantized_models import PROMPT, expected_logits
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from raytide.actors.engine import LLM
from raytide.actors.engine.sampling_params import SamplingParams
from raytide.actors.models.families import read_architecture

pytest.importorskip("gguf", reason="the oracle, llama.cpp's gguf package, is not installed")

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1, "initializer_range": 0.1}
Q4_K_M = {"v_proj": "Q6_K", "down_proj": "Q6_K", "_proj": "Q4_K", "embed": "Q6_K", "lm_head": "Q6_K"}


@pytest.mark.parametrize("form", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_logits_are_those_of_the_stored_weights(form: str, tmp_path: Path) -> None:
    model = save_llama(tmp_path, **WIDE, tie_word_embeddings=form == "Q8_0")
    save_gguf(tmp_path / "m.gguf", model, form)
    llm = LLM(tmp_path / "m.gguf", quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=2e-4, rtol=1e-4)
    assert llm.info.quantization == ("" if form[0] in "FB" else f"gguf {form}; computed with float inputs")


def test_a_stack_of_two_formats_is_computed(tmp_path: Path) -> None:
    model = save_llama(tmp_path, **WIDE)
    save_gguf(tmp_path / "m.gguf", model, Q4_K_M)
    llm = LLM(tmp_path / "m.gguf", quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=2e-4, rtol=1e-4)
    assert llm.info.quantization.startswith("gguf Q4_K, Q6_K;") or "Q6_K, Q4_K" in llm.info.quantization


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_families(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    shape: dict[str, Any] = {
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **WIDE,
        "tie_word_embeddings": True,
    }
    config, network = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[kind]
    model = network(config(**shape)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    save_gguf(tmp_path / "m.gguf", model, "Q8_0", kind=kind)
    llm = LLM(tmp_path / "m.gguf", quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=2e-4, rtol=1e-4)


def test_rope_factors_of_a_file_divide_the_frequencies(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = save_llama(tmp_path, **WIDE, rope_parameters=llama3)
    plain = 1.0 / 5000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = plain / model.model.rotary_emb.inv_freq
    assert factors.max() > 1.5
    import gguf

    add, tensors = gguf.GGUFWriter.add_token_list, {"rope_freqs.weight": factors.numpy()}

    def with_factors(writer: Any, tokens: Any) -> None:
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        add(writer, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_token_list", with_factors)
        save_gguf(tmp_path / "m.gguf", model, "F32")
    torch.testing.assert_close(LLM(tmp_path / "m.gguf").logits(PROMPT), expected_logits(model), atol=2e-4, rtol=1e-4)


def test_the_fields_of_yarn_mean_what_they_mean_in_a_directory(tmp_path: Path) -> None:
    import gguf

    yarn = {"factor": 4.0, "attention_factor": 0.875, "beta_fast": 16.0, "beta_slow": 2.0}
    fixed = {"rope_type": "yarn", "rope_theta": 5000.0, "original_max_position_embeddings": 64}
    model = save_llama(tmp_path, **WIDE, rope_parameters=fixed | yarn)
    names = {"factor": "factor", "attention_factor": "yarn_attn_factor"}
    fields: dict[str, Any] = {
        f"llama.rope.scaling.{names.get(name, f'yarn_{name}')}": (value, gguf.GGUFValueType.FLOAT32)
        for name, value in yarn.items()
    }
    fields["llama.rope.scaling.original_context_length"] = (64, gguf.GGUFValueType.UINT32)
    save_gguf(tmp_path / "m.gguf", model, "F32", **{"llama.rope.scaling.type": "yarn"}, **fields)
    assert read_architecture(tmp_path / "m.gguf").ropes == read_architecture(tmp_path).ropes


def test_its_tokenizer_and_template_come_from_the_file(tmp_path: Path) -> None:
    model = save_llama(tmp_path, **WIDE)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}<eos>"
    save_gguf(tmp_path / "m.gguf", model, "Q8_0", **{"tokenizer.chat_template": template})
    directory, file = LLM(tmp_path), LLM(tmp_path / "m.gguf")
    said = [{"role": "user", "content": "def f(x):"}]
    tokens = [llm.chat(said, SamplingParams(max_tokens=1)).prompt_token_ids for llm in (directory, file)]
    assert file._core.tokenizer.encode("import os\n  return 12") == directory._core.tokenizer.encode(
        "import os\n  return 12"
    )
    assert tokens[1][-1] == 0
    assert file.info.weights_version != directory.info.weights_version


def test_an_adapter_is_added_to_quantized_layers(tmp_path: Path) -> None:
    from tests.actors.engine.tiny import save_adapter

    model = save_llama(tmp_path, intermediate_size=64)
    save_gguf(tmp_path / "m.gguf", model, "Q8_0")
    llm = LLM(tmp_path / "m.gguf", quantized_input="float", quantized_head=False)
    before = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0.0))[0].outputs[0].token_ids
    llm.load_lora("a", save_adapter(tmp_path / "adapter", alpha=64))
    with_lora = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0.0), lora="a")[0].outputs[0].token_ids
    assert with_lora != before
