"""Plans count the bytes that a quantized model's weights have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.actors.models.quantized.gguf.gguf_files import field, header, tensor, text

from raytide.sdk.plan import model_named
from raytide.sizing.devices import DEVICES
from raytide.sizing.serving import decode_seconds, kv_room

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


def test_a_quantized_config_makes_a_smaller_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    plain = model_named(path)
    path.write_text(json.dumps({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}))
    small = model_named(path)
    assert plain.parameters == small.parameters
    assert plain.weight_bytes == 2.0
    assert 0.53125 < small.weight_bytes < 0.6  # 4 bits and scales, and an embedding and a head in bfloat16
    device = next(iter(DEVICES.values()))
    assert kv_room(small, device, 1) > kv_room(plain, device, 1)
    assert decode_seconds(small, 1, 100.0, device) < decode_seconds(plain, 1, 100.0, device)


def test_a_gguf_file_has_the_bytes_of_its_tensors(tmp_path: Path) -> None:
    fields = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 32,
        "llama.attention.head_count": 2,
    }
    eps = text("llama.attention.layer_norm_rms_epsilon") + b"\6\0\0\0\x17\xb7\xd1\x38"
    listed = [field(name, value) for name, value in fields.items()]
    path = tmp_path / "m.gguf"
    path.write_bytes(header([*listed, eps], [tensor("token_embd.weight", [32, 8], 8)]) + bytes(8 * 34))
    shape = model_named(path)
    assert shape.weight_bytes * shape.parameters == pytest.approx(8 * 34)
