"""Directories in compressed-tensors' formats, written by its own compressors, against its own dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from tests.actors.models.quantized.quantized_models import (
    PROMPT,
    Quantizer,
    change_config,
    expected_logits,
    save_quantized,
)

from raytide.actors.engine import LLM

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
W8A8_INPUT = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8 = {"num_bits": 8, "type": "float"}


def quantizer(form: str, weights: dict[str, Any], g_idx: bool = False) -> Quantizer:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        state = {"weight": weight, **scales_of(weight, scheme.weights)}
        if g_idx:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
            groups = torch.arange(weight.shape[1]) // weights["group_size"]
            state["weight_g_idx"] = torch.empty_like(groups, dtype=torch.int32).index_copy_(0, order, groups.int())
        stored = compressor.compress(state, scheme)
        # It multiplies in the dtype of the scales, and bfloat16 would round the weights once more.
        return stored, compressor.decompress(stored | {"weight_scale": stored["weight_scale"].float()}, scheme)[
            "weight"
        ]

    return quantize


def scales_of(weight: torch.Tensor, args: QuantizationArgs) -> dict[str, torch.Tensor]:
    """Returns round-to-nearest scales, in bfloat16 as llm-compressor saves them."""
    rows, columns = weight.shape
    if args.strategy == "block":
        high, wide = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        blocks = padded.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
        least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "tensor":
        least, most = weight.amin().reshape(1), weight.amax().reshape(1)
    else:
        grouped = weight.unflatten(1, (-1, args.group_size if args.strategy == "group" else columns))
        least, most = grouped.amin(2), grouped.amax(2)
    scale, zero = calculate_qparams(least, most, args)
    return {"weight_scale": scale.bfloat16(), "weight_zero_point": zero}


CASES = {
    "W8A8": ("int-quantized", INT8, {"input_activations": W8A8_INPUT}),
    "W8A8 by tensor": ("int-quantized", INT8 | {"strategy": "tensor"}, {}),
    "W8A8 with zero points": ("int-quantized", INT8 | {"symmetric": False}, {}),
    "W4A16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, {}),
    "W4A16 by output": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, {}),
    "W4A16 with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
        {},
    ),
    "W8A16": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}, {}),
    "W8A16 with zero points": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": False},
        {},
    ),
    "FP8": ("float-quantized", FP8 | {"strategy": "tensor"}, {}),
    "FP8 by output": ("float-quantized", FP8 | {"strategy": "channel"}, {}),
    "FP8 by block": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [32, 32]}, {}),
}


def config_of(form: str, weights: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "format": form, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "version": "0.17.0",
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    form, weights, more = CASES[name]
    model = save_quantized(tmp_path, quantizer(form, weights), config_of(form, weights, more))
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
    kind = "fp8" if weights.get("type") == "float" else f"int{weights['num_bits']}"
    assert llm.info.quantization.startswith(f"compressed-tensors {kind}")
    assert llm.info.quantization.endswith("float inputs")


def test_groups_of_columns_in_another_order_are_read(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
    quantize = quantizer("pack-quantized", weights, g_idx=True)
    model = save_quantized(tmp_path, quantize, config_of("pack-quantized", weights, {}))
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)


def test_columns_whose_order_was_never_chosen_are_in_order(tmp_path: Path) -> None:
    """The library fills `weight_g_idx` with -1, and only GPTQ writes an order into it."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"}
    quantize = quantizer("pack-quantized", weights)

    def without_order(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        stored, back = quantize(weight)
        return stored | {"weight_g_idx": torch.full((weight.shape[1],), -1, dtype=torch.int32)}, back

    model = save_quantized(tmp_path, without_order, config_of("pack-quantized", weights, {}), num_hidden_layers=1)
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)


def test_parts_of_a_stack_may_have_different_schemes(tmp_path: Path) -> None:
    int4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
    config = config_of("mixed-precision", int4, {"format": "pack-quantized"})
    config["config_groups"]["group_1"] = {"targets": ["re:.*k_proj"], "weights": INT8, "format": "int-quantized"}
    save_quantized(tmp_path, quantizer("pack-quantized", int4), config, "_proj")
    four, eight = quantizer("pack-quantized", int4), quantizer("int-quantized", INT8)
    parts = iter([four, eight, four, four, four, four, four] * 3)  # q, k, v, o, gate, up, down of each layer
    model = save_quantized(tmp_path, lambda weight: next(parts)(weight), config)
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
    assert llm.info.quantization.startswith("compressed-tensors int4 g32, int8;")


def test_a_quantized_head_is_read_although_the_embedding_was_tied(tmp_path: Path) -> None:
    model = save_quantized(tmp_path, quantizer("int-quantized", INT8), config_of("int-quantized", INT8, {}), "lm_head")
    change_config(tmp_path, tie_word_embeddings=True)
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)


def test_modules_that_are_all_ignored_are_computed_as_they_are(tmp_path: Path) -> None:
    config = config_of("int-quantized", INT8, {}) | {"ignore": ["re:.*"]}
    model = save_quantized(tmp_path, quantizer("int-quantized", INT8), config, only="none of them")
    llm = LLM(tmp_path)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
    assert llm.info.quantization == ""


def test_self_describing_tensors_need_no_config(tmp_path: Path) -> None:
    model = save_quantized(tmp_path, quantizer("int-quantized", INT8), {})
    change_config(tmp_path, quantization_config=None)
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
