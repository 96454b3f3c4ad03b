"""Quantized weights that would be computed wrongly are refused: by the config before anything starts, by their tensors
when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.actors.models.quantized.quantized_models import Tensors

from raytide.actors.models.quantized.model_weights import ModelWeights, open_weights
from raytide.actors.models.quantized.quantization_config import read_quantization
from raytide.core.errors import ConfigError, DataError, RaytideError

M = "model.layers.0.mlp.down_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def ct(**fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": INT4}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "format": "pack-quantized"} | fields


def ct_weights(**fields: Any) -> dict[str, Any]:
    return ct(config_groups={"g": {"targets": ["Linear"], "weights": INT4 | fields}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "of method bitsandbytes are not supported"),
        ({"quant_method": "mxfp4"}, "of method mxfp4"),
        ({"bits": 4}, "without quant_method"),
        ([], "is no object"),
        (ct(transform_config={"config_groups": {"u": {}}}), "transform_config .* is not supported"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not supported"),
        (ct(kv_cache_scheme={"num_bits": 8, "type": "float"}), "kv_cache_scheme"),
        (ct(format="nvfp4-pack-quantized"), "format nvfp4-pack-quantized is not supported"),
        (ct(format="marlin-24"), "format marlin-24"),
        (ct(config_groups={"g": {"targets": ["Linear"], "weights": INT4, "output_activations": {}}}), "output_activa"),
        (ct(config_groups={"g": {"targets": ["Linear"], "input_activations": {}}}), "without weights"),
        (ct(config_groups={"g": {"targets": ["Linear"], "wieghts": INT4}}), "did you mean weights"),
        (ct(config_groups={"g": ["Linear"]}), "config_groups.g"),
        (ct_weights(num_bits=3), "3 bits of type int"),
        (ct_weights(num_bits=4, type="float"), "4 bits of type float"),
        (ct_weights(num_bits=8, type="float", block_structure="128"), "two positive numbers"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "3 bits are not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({"quant_method": "gptq", "bits": "four"}, "bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv"),
        ({"quant_method": "awq", "w_bit": 8}, "8 bits are not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e5m2"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "two positive numbers"),
    ],
)
def test_a_config_is_refused_by_name(config: object, message: str) -> None:
    with pytest.raises(RaytideError, match=message) as caught:
        read_quantization({"quantization_config": config}, "config.json")
    assert caught.value.hint


def test_a_config_without_quantization_has_none() -> None:
    assert read_quantization({"quantization_config": None, "hidden_size": 8}, "config.json") is None


def packed(rows: int = 8, columns: int = 64, group: int = 32) -> Tensors:
    return {
        f"{M}.weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32),
        f"{M}.weight_scale": torch.rand(rows, columns // group).bfloat16(),
        f"{M}.weight_shape": torch.tensor([rows, columns]),
    }


def gptq_tensors(rows: int = 8, columns: int = 64, group: int = 32) -> Tensors:
    return {
        f"{M}.qweight": torch.zeros(columns // 8, rows, dtype=torch.int32),
        f"{M}.qzeros": torch.zeros(columns // group, rows // 8, dtype=torch.int32),
        f"{M}.scales": torch.ones(columns // group, rows).half(),
        f"{M}.g_idx": torch.arange(columns, dtype=torch.int32) // group,
    }


def opened(folder: Path, tensors: Tensors, config: object = None) -> ModelWeights:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_weights(folder, torch.float32, torch.device("cpu"))


Change = Callable[[Tensors], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[f"{M}.weight_scale"].fill_(torch.nan), "weight_scale has scales that are not finite"),
        (lambda t: t[f"{M}.weight_scale"].fill_(torch.inf), "not finite"),
        (lambda t: t.pop(f"{M}.weight_scale"), "has no weight_scale"),
        (lambda t: t.pop(f"{M}.weight_shape"), "has no weight_shape"),
        (lambda t: t.update({f"{M}.weight_shape": torch.tensor([64, 8])}), "weight_shape is"),
        (lambda t: t.update({f"{M}.weight_scale": torch.rand(8, 3)}), "64 inputs cannot be divided into 3 groups"),
        (lambda t: t.update({f"{M}.weight_scale": torch.rand(7, 2)}), "has shape"),
        (lambda t: t.update({f"{M}.weight_scale": torch.ones(8, 2, dtype=torch.uint8)}), "stored as U8, not BF16"),
        (lambda t: t.update({f"{M}.weight": torch.rand(8, 64)}), "has weight beside its weight"),
        (lambda t: t.update({f"{M}.output_scale": torch.ones(1)}), "has output_scale beside"),
        (lambda t: t.update({f"{M}.weight_packed": torch.zeros(8, 6, dtype=torch.int32)}), "neither 4 nor 8 bits"),
        (lambda t: t.update({f"{M}.weight_packed": torch.zeros(8, 32, dtype=torch.uint8)}), "mxfp4 is not supported"),
        (
            lambda t: t.update(
                {
                    f"{M}.weight_packed": torch.zeros(8, 32, dtype=torch.uint8),
                    f"{M}.weight_global_scale": torch.ones(1),
                }
            ),
            "nvfp4 is not supported",
        ),
        (lambda t: t.update({f"{M}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}), "32 inputs into each group"),
    ],
)
def test_damaged_packed_tensors_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    tensors = packed()
    change(tensors)
    with pytest.raises(RaytideError, match=message):
        opened(tmp_path, tensors).quantized(M, 8, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[f"{M}.scales"].fill_(torch.nan), "not finite"),
        (lambda t: t.pop(f"{M}.qzeros"), "has no qzeros"),
        (lambda t: t.update({f"{M}.g_idx": torch.full((64,), 7, dtype=torch.int32)}), "32 inputs into each group"),
        (lambda t: t.update({f"{M}.qweight": torch.zeros(64, 1, dtype=torch.int32)}), "neither 4 nor 8 bits"),
    ],
)
def test_damaged_gptq_tensors_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    tensors = gptq_tensors()
    change(tensors)
    with pytest.raises(DataError, match=message):
        opened(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32}).quantized(M, 8, 64)


def test_words_of_an_unknown_method_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not say whether it is of gptq or awq"):
        opened(tmp_path, gptq_tensors()).quantized(M, 8, 64)


def test_tensors_of_another_scheme_than_the_config_s_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"down_proj are int4 g32, config.json says int8 g32"):
        opened(tmp_path, packed(), ct_weights(num_bits=8)).quantized(M, 8, 64)
    with pytest.raises(DataError, match=r"down_proj are int4 g32, config.json says int4 g16"):
        opened(tmp_path, packed(), ct_weights(group_size=16)).quantized(M, 8, 64)


def test_scales_without_codes_are_refused(tmp_path: Path) -> None:
    weights = opened(tmp_path, {f"{M}.weight": torch.rand(8, 64), f"{M}.weight_scale": torch.ones(8, 1)})
    with pytest.raises(DataError, match="has weight_scale beside its weight"):
        weights.quantized(M, 8, 64)


def test_integer_weights_without_scales_are_refused(tmp_path: Path) -> None:
    weights = opened(tmp_path, {f"{M}.weight": torch.ones(8, 64, dtype=torch.int8)})
    assert weights.quantized(M, 8, 64) is None
    with pytest.raises(DataError, match="stored as I8, without what quantized weights have beside them"):
        weights.get(f"{M}.weight", 8, 64)


def test_quantized_modules_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    weights = opened(tmp_path, packed() | {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    assert weights.quantized(M, 8, 64) is not None
    with pytest.raises(DataError, match=r"quantized modules that its architecture does not: model.layers.0.self_attn"):
        weights.check_all_read()


@pytest.mark.parametrize("shape", [(4, 64), (2, 3)])
def test_fp8_scales_of_other_blocks_are_refused(shape: tuple[int, int], tmp_path: Path) -> None:
    tensors = {f"{M}.weight": torch.ones(8, 64).to(torch.float8_e4m3fn), f"{M}.weight_scale_inv": torch.ones(shape)}
    with pytest.raises(DataError, match="blocks of 128 x 128 have"):
        opened(tmp_path, tensors, {"quant_method": "fp8"}).get(f"{M}.weight", 8, 64)


def test_fp8_codes_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    codes = torch.full((8, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {f"{M}.weight": codes, f"{M}.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(DataError, match="not finite"):
        opened(tmp_path, tensors, {"quant_method": "fp8"}).get(f"{M}.weight", 8, 64)


def test_a_quantized_module_can_be_read_as_a_plain_tensor(tmp_path: Path) -> None:
    weights = opened(tmp_path, packed())
    quantized = weights.quantized(M, 8, 64)
    assert quantized is not None
    assert f"{M}.weight" in weights
    torch.testing.assert_close(weights.get(f"{M}.weight", 8, 64), quantized.dequantized())


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, packed())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises((DataError, ConfigError), match=r"model\.safetensors"):
        open_weights(tmp_path, torch.float32, torch.device("cpu")).quantized(M, 8, 64)
