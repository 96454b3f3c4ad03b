"""GPTQ, AWQ and block FP8: files of packers written here from the formats' definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.actors.models.quantized.quantized_models import (
    PROMPT,
    Quantizer,
    Tensors,
    expected_logits,
    save_quantized,
)

from raytide.actors.engine import LLM
from raytide.actors.models.quantized.model_weights import open_weights

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds this one of its 8 columns


def codes_of(weight: torch.Tensor, bits: int, group: int, sym: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes [N, K], scales [N, G] and zero points [N, G] of a plain rounding to unsigned codes."""
    grouped = weight.double().numpy().reshape(weight.shape[0], -1, group)
    most = 2**bits - 1
    if sym:
        scales = np.abs(grouped).max(2) / (most // 2)
        zeros = np.full(scales.shape, (most + 1) // 2)
    else:
        scales = (grouped.max(2) - grouped.min(2)) / most
        zeros = np.clip(np.round(-grouped.min(2) / scales), 1, most).astype(int)
    scales = scales.astype(np.float16).astype(np.float64)
    codes = np.clip(np.round(grouped / scales[..., None]) + zeros[..., None], 0, most)
    return codes.reshape(weight.shape).astype(np.int64), scales, zeros


def words_of(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Packs the last dimension: code i of a word lies i * bits above its lowest bit."""
    per_word = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.uint64)
    words = sum(grouped[..., i] << np.uint64(i * bits) for i in range(per_word))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32).copy())


def gptq(bits: int, group: int, sym: bool, *, version: int, act_order: bool = False) -> Quantizer:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        size = columns if group == -1 else group
        order = np.random.default_rng(columns).permutation(columns) if act_order else np.arange(columns)
        codes, scales, zeros = codes_of(weight[:, order], bits, size, sym)
        g_idx = np.empty(columns, np.int32)
        g_idx[order] = np.arange(columns) // size
        in_place = np.empty_like(codes)
        in_place[:, order] = codes
        weight_back = (in_place - zeros[:, g_idx]) * scales[:, g_idx]
        tensors = {
            "qweight": words_of(in_place, bits).t(),
            "qzeros": words_of((zeros - (version == 1)).T, bits),
            "scales": torch.from_numpy(scales.T.copy()).half(),
            "g_idx": torch.from_numpy(g_idx),
        }
        return tensors, torch.from_numpy(weight_back)

    return quantize


def awq(group: int) -> Quantizer:
    def in_nibbles(codes: np.ndarray) -> torch.Tensor:
        return words_of(codes.reshape(*codes.shape[:-1], -1, 8)[..., AWQ_COLUMNS].reshape(codes.shape), 4)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = codes_of(weight, 4, group, sym=False)
        wide = [np.repeat(each, group, 1) for each in (zeros, scales)]
        tensors = {
            "qweight": in_nibbles(codes.T),
            "qzeros": in_nibbles(zeros.T),
            "scales": torch.from_numpy(scales.T.copy()).half(),
        }
        return tensors, torch.from_numpy((codes - wide[0]) * wide[1])

    return quantize


def block_fp8(weight: torch.Tensor, rows: int = 48, columns: int = 40) -> tuple[Tensors, torch.Tensor]:
    scales = torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) * 0.01 + 0.001
    wide = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            wide[row, column] = scales[row // rows, column // columns]
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


def gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "damp_percent": 0.1, **more}


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "group", "sym"), [(4, 32, True), (4, 16, False), (8, 64, True), (4, -1, False)])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(version: int, bits: int, group: int, sym: bool, act_order: bool, tmp_path: Path) -> None:
    form = {} if version == 1 else {"checkpoint_format": "gptq_v2"}
    quantize = gptq(bits, group, sym, version=version, act_order=act_order)
    model = save_quantized(tmp_path, quantize, gptq_config(bits, group, **form), num_hidden_layers=1)
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
    assert llm.info.quantization.startswith(f"gptq int{bits}")


def words_at(folder: Path, bits: int, zeros: np.ndarray, stored: torch.Tensor, **config: Any) -> tuple[Any, Any]:
    """Writes a module whose zero points are stored as `stored`. Returns its weight as read, and as it was meant."""
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (8, 32))
    tensors = {
        "m.qweight": words_of(codes, bits).t().contiguous(),
        "m.qzeros": stored,
        "m.scales": torch.ones(1, 8).half(),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": gptq_config(bits, 32, **config)}))
    read = open_weights(folder, torch.float32, torch.device("cpu")).get("m.weight", 8, 32)
    return read, torch.from_numpy(codes - zeros.reshape(8, 1)).float()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_borrows_from_the_next_one_of_its_word(bits: int, tmp_path: Path) -> None:
    """GPTQModel stores asymmetric weights in the first format by subtracting 1 from all codes of a word at once."""
    zeros = np.array([[0, 8, 15, 0, 0, 1, 7, 0]])
    ones = sum(1 << at for at in range(0, 32, bits))
    read, meant = words_at(tmp_path, bits, zeros, words_of(zeros, bits) - ones, sym=False, checkpoint_format="gptq")
    assert torch.equal(read, meant)


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_zero_points_of_symmetric_weights_are_the_middle_code_in_either_format(
    bits: int, less: int, tmp_path: Path
) -> None:
    zeros = np.full((1, 8), 1 << bits - 1)
    read, meant = words_at(tmp_path, bits, zeros, words_of(zeros - less, bits), sym=True, checkpoint_format="gptq")
    assert torch.equal(read, meant)


@pytest.mark.parametrize("group", [16, 64])
def test_awq(group: int, tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    model = save_quantized(tmp_path, awq(group), config)
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)


def test_weights_that_are_read_are_stacked_as_those_that_are_mapped(tmp_path: Path) -> None:
    """As those of an expert, in an engine with `weights_memory_gb`."""
    save_quantized(tmp_path, gptq(4, 32, True, version=1), {"quant_method": "gptq", "bits": 4, "group_size": 32})
    names = [f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up")]
    read, mapped = (
        open_weights(tmp_path, torch.float32, torch.device("cpu"), maps=maps).stack(names, [128, 128], 64)
        for maps in (False, True)
    )
    assert torch.equal(read, mapped)


def test_fp8_in_blocks_that_do_not_divide_the_weights(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 40]}
    model = save_quantized(tmp_path, block_fp8, config, num_hidden_layers=1)
    llm = LLM(tmp_path)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
    assert llm.info.quantization.startswith("fp8 fp8")


def test_the_version_differs_between_meanings_of_the_same_tensors(tmp_path: Path) -> None:
    quantize = gptq(4, 32, True, version=2)
    versions = set()
    for form in ("gptq", "gptq_v2"):
        save_quantized(tmp_path / form, quantize, gptq_config(4, 32, checkpoint_format=form))
        versions.add(LLM(tmp_path / form).info.weights_version)
    assert len(versions) == 2


def test_weights_are_exchanged_between_formats(tmp_path: Path) -> None:
    plain = save_quantized(tmp_path / "a", gptq(4, 32, True, version=1), gptq_config(4, 32))
    other = save_quantized(tmp_path / "b", awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32})
    llm = LLM(tmp_path / "a", quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(plain), atol=1e-4, rtol=1e-4)
    llm.load_weights(tmp_path / "b")
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(other), atol=1e-4, rtol=1e-4)
    assert llm.info.quantization.startswith("awq int4 g32")


def test_a_quantized_module_of_a_stack_may_stand_beside_plain_ones(tmp_path: Path) -> None:
    quantize = gptq(4, 32, True, version=1)
    model = save_quantized(tmp_path, quantize, gptq_config(4, 32), only="k_proj")
    llm = LLM(tmp_path, quantized_input="float", quantized_head=False)
    torch.testing.assert_close(llm.logits(PROMPT), expected_logits(model), atol=1e-4, rtol=1e-4)
