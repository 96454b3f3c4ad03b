"""Members that share quantized weights compute what one process does; groups that would be cut are refused."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.actors.engine.model.parallel.test_shard import sharded_logits, whole_logits
from tests.actors.engine.tiny import save_llama
from tests.actors.models.quantized.gguf.gguf_files import save_gguf
from tests.actors.models.quantized.quantized_models import save_quantized
from tests.actors.models.quantized.test_compressed_tensors import CASES, config_of, quantizer
from tests.actors.models.quantized.test_packed_formats import awq, block_fp8, gptq, gptq_config

from raytide.actors.engine.model.parallel.shard import ModelShard
from raytide.actors.engine.model.parallel.sharded_weights import ShardedWeights
from raytide.actors.engine.model.weight_loader import QuantizedOptions
from raytide.actors.models.families import read_architecture
from raytide.actors.models.loader import Weights
from raytide.actors.models.quantized.cutting import cut_inputs
from raytide.actors.models.quantized.gguf import gguf_weights
from raytide.actors.models.quantized.gguf.gguf_file import GgufTensor
from raytide.actors.models.quantized.gguf.gguf_weights import GgufWeights
from raytide.actors.models.quantized.model_weights import open_weights
from raytide.core.errors import ConfigError
from raytide.kernels.core import LinearInput, QuantizedWeight
from raytide.kernels.registry import ops_for

WIDE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 2}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    form, weights, more = CASES[name]
    save_quantized(tmp_path, quantizer(form, weights), config_of(form, weights, more), **WIDE)
    close(sharded_logits(tmp_path, 2), whole_logits(tmp_path))


PACKED = {
    "gptq": (gptq(4, 32, False, version=1), gptq_config(4, 32)),
    "gptq of 8 bits, by output, in another order": (gptq(8, -1, True, version=1, act_order=True), gptq_config(8, -1)),
    "awq": (awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}),
    "fp8": (
        block_fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [48, 40]},
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_formats(name: str, tmp_path: Path) -> None:
    quantize, config = PACKED[name]
    save_quantized(tmp_path, quantize, config, **WIDE)
    close(sharded_logits(tmp_path, 2), whole_logits(tmp_path))


READ_IN_PARTS = {
    **{name: (quantizer(*CASES[name][:2]), config_of(*CASES[name])) for name in ("W4A16", "W8A16", "W8A8")},
    **{name: PACKED[name] for name in ("gptq", "awq")},
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The bytes that were read of each tensor of a directory."""
    read, stored, stored_part = Counter[str](), Weights.stored, Weights.stored_part

    def count(tensor: str, values: torch.Tensor) -> torch.Tensor:
        read[tensor] += values.nbytes
        return values

    monkeypatch.setattr(Weights, "stored", lambda self, tensor: count(tensor, stored(self, tensor)))
    monkeypatch.setattr(
        Weights, "stored_part", lambda self, tensor, where: count(tensor, stored_part(self, tensor, where))
    )
    return read


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("name", READ_IN_PARTS)
def test_two_members_read_each_code_once(name: str, maps: bool, tmp_path: Path, read: Counter[str]) -> None:
    quantize, config = READ_IN_PARTS[name]
    save_quantized(tmp_path, quantize, config, **WIDE)
    arch = read_architecture(tmp_path)
    weights = open_weights(tmp_path, torch.float32, torch.device("cpu"), maps=maps)
    whole = {module: weights.quantized(module, *shape) for module, shape in MODULES.items()}
    sizes, codes = dict(read), [tensor for tensor in read if CODES.search(tensor)]
    assert len(codes) == len(MODULES)
    read.clear()
    parts = [ShardedWeights(weights, arch, ModelShard(rank, 2)) for rank in range(2)]
    for module, (rows, columns) in MODULES.items():
        by_input = module.endswith("down_proj")
        own = [part.quantized(module, *((rows, columns // 2) if by_input else (rows // 2, columns))) for part in parts]
        expected = whole[module]
        assert expected is not None
        joined = torch.cat([each.dequantized() for each in own if each is not None], int(by_input))
        assert torch.equal(joined, expected.dequantized())
    assert {tensor: read[tensor] for tensor in codes} == {tensor: sizes[tensor] for tensor in codes}


CODES = re.compile(r"weight_packed$|qweight$|\.weight$")
MODULES = {"model.layers.0.mlp.gate_proj": (256, 128), "model.layers.0.mlp.down_proj": (128, 256)}


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("name", [*READ_IN_PARTS, "fp8"])
def test_two_members_read_each_code_of_what_is_dequantized_once(
    name: str, maps: bool, tmp_path: Path, read: Counter[str]
) -> None:
    """As fp8 is, and the quantized modules that are no linear ones, such as embeddings."""
    quantize, config = READ_IN_PARTS.get(name) or PACKED[name]
    save_quantized(tmp_path, quantize, config, **WIDE)
    arch = read_architecture(tmp_path)
    weights = open_weights(tmp_path, torch.float32, torch.device("cpu"), maps=maps)
    whole = {module: weights.get(f"{module}.weight", *shape) for module, shape in MODULES.items()}
    sizes, codes = dict(read), [tensor for tensor in read if CODES.search(tensor)]
    assert len(codes) == len(MODULES)
    read.clear()
    parts = [ShardedWeights(weights, arch, ModelShard(rank, 2)) for rank in range(2)]
    for module, (rows, columns) in MODULES.items():
        by_input = module.endswith("down_proj")
        own = (rows, columns // 2) if by_input else (rows // 2, columns)
        joined = torch.cat([part.get(f"{module}.weight", *own) for part in parts], int(by_input))
        assert torch.equal(joined, whole[module])
    assert {tensor: read[tensor] for tensor in codes} == {tensor: sizes[tensor] for tensor in codes}


def test_inputs_of_a_group_that_is_cut_are_dequantized_before(tmp_path: Path) -> None:
    quantize, config = PACKED["gptq"]
    save_quantized(tmp_path, quantize, config, **WIDE)
    weights = open_weights(tmp_path, torch.float32, torch.device("cpu"))
    name, shape = "model.layers.0.mlp.down_proj.weight", (128, 256)
    part = weights.block(name, shape, (slice(8, 64), slice(16, 80)))
    assert torch.equal(part, weights.get(name, *shape)[8:64, 16:80])


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "F16"])
def test_two_members_read_each_row_of_a_gguf_file_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of queries and keys have another order there."""
    model = save_llama(tmp_path / "plain", **WIDE)
    save_gguf(tmp_path / "model.gguf", model, form)
    weights = open_weights(tmp_path / "model.gguf", torch.float32, torch.device("cpu"))
    assert isinstance(weights, GgufWeights)
    at = "model.layers.0."
    names = ["model.embed_tokens", f"{at}self_attn.q_proj", f"{at}self_attn.k_proj", f"{at}mlp.up_proj"]
    whole = {}
    for name in names:
        there = weights._file.tensors[gguf_weights._gguf_name(f"{name}.weight")]
        whole[name] = weights.get(f"{name}.weight", *there.shape)
    read, raw = list[int](), GgufWeights._raw

    def counted(self: GgufWeights, tensor: GgufTensor, rows: tuple[int, int]) -> torch.Tensor:
        found = raw(self, tensor, rows)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(GgufWeights, "_raw", counted)
    arch = read_architecture(tmp_path / "model.gguf")
    parts = [ShardedWeights(weights, arch, ModelShard(rank, 2)) for rank in range(2)]
    for name, expected in whole.items():
        rows, columns = expected.shape
        joined = [part.get(f"{name}.weight", rows // 2, columns) for part in parts]
        assert torch.equal(torch.cat(joined), expected)
        linear = [part.quantized(name, rows // 2, columns) for part in parts]
        codes = [each.dequantized() for each in linear if each is not None]
        assert not codes or torch.equal(torch.cat(codes), expected)
        size = weights._file.tensors[gguf_weights._gguf_name(f"{name}.weight")].bytes
        assert (sum(read), len(read)) == (size * (1 + bool(codes)), 2 + len(codes))
        read.clear()


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0"])
def test_gguf_files_with_a_head_that_is_rounded(form: str, tmp_path: Path) -> None:
    model = save_llama(tmp_path / "plain", **WIDE)
    save_gguf(tmp_path / "model.gguf", model, form)
    options = QuantizedOptions(rounds_head=True)
    close(sharded_logits(tmp_path / "model.gguf", 2, options=options), whole_logits(tmp_path / "model.gguf", options))


def test_four_members_and_two_stages(tmp_path: Path) -> None:
    form, weights, more = CASES["W4A16"]
    save_quantized(tmp_path, quantizer(form, weights), config_of(form, weights, more), **WIDE)
    expected = whole_logits(tmp_path)
    close(sharded_logits(tmp_path, 4), expected)
    close(sharded_logits(tmp_path, 2, stages=2), expected)


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a group of 64 in heads of 32": (
        *(quantizer(*CASES["W8A16"][:2]), config_of(*CASES["W8A16"])),
        WIDE | {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},
        r"self_attn.o_proj has 192 inputs in groups of 64, and tensor_parallel 2 gives each process 96 of them",
    ),
    "desc_act": (
        *(gptq(4, 32, True, version=1, act_order=True), gptq_config(4, 32)),
        WIDE,
        r"o_proj has groups of inputs that are not neighbours \(desc_act\), which tensor_parallel 2 would cut",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_would_be_cut_are_refused_with_the_sizes(name: str, tmp_path: Path) -> None:
    quantize, config, sizes, message = REFUSED[name]
    save_quantized(tmp_path, quantize, config, **sizes)
    with pytest.raises(ConfigError, match=message) as refused:
        sharded_logits(tmp_path, 2)
    assert "pipeline_parallel" in str(refused.value.hint)


def test_groups_of_rounded_inputs_are_not_cut_either(tmp_path: Path) -> None:
    form, weights, more = CASES["W8A8"]
    save_quantized(tmp_path, quantizer(form, weights), config_of(form, weights, more), intermediate_size=96)
    close(sharded_logits(tmp_path, 2), whole_logits(tmp_path))
    with pytest.raises(ConfigError, match=re.escape("mlp.down_proj has 96 inputs in groups of 32")):
        sharded_logits(tmp_path, 2, options=QuantizedOptions("int8"))


@pytest.mark.parametrize("input_as", ["float", "int8"])
@pytest.mark.parametrize(
    ("bits", "group", "has_offsets"), [(8, 128, False), (8, 32, True), (4, 32, True), (4, 64, False)]
)
def test_a_cut_product_is_the_part_of_the_whole_to_the_bit_and_parts_add_up(
    bits: int, group: int, has_offsets: bool, input_as: LinearInput
) -> None:
    generator, (size, width) = torch.Generator().manual_seed(bits + group), (48, 128)
    most = 1 << (bits - 1)
    weight = QuantizedWeight(
        bits,  # type: ignore[arg-type]
        torch.randint(-most, most, (size, width), generator=generator, dtype=torch.int8),
        torch.rand(size, width // group, generator=generator) * 0.01,
        torch.randn(size, width // group, generator=generator) * 0.1 if has_offsets else None,
    )
    x_TK, linear = torch.randn(9, width, generator=generator), ops_for("cpu").quantized_linear
    whole = linear(weight, None, input_as)(x_TK)
    ranges = [(32, 48), (0, 16)]
    rows = torch.cat([torch.arange(a, b) for a, b in ranges])
    offsets_NG = None if weight.offsets_NG is None else weight.offsets_NG[rows]
    own = QuantizedWeight(weight.bits, weight.codes_NK[rows], weight.scales_NG[rows], offsets_NG)
    assert torch.equal(linear(own, None, input_as)(x_TK), whole[:, rows])
    total = torch.zeros_like(whole)
    for first in (0, 64):
        part = cut_inputs(weight, first, first + 64)
        assert part is not None
        assert torch.equal(part.dequantized(), weight.dequantized()[:, first : first + 64])
        total += linear(part, None, input_as)(x_TK[:, first : first + 64])
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
