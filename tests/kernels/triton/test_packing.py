"""Packed panels hold the weight: what the kernels read back is what was given."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from raytide.kernels.core import QuantizedWeight
from raytide.kernels.triton.packing import PackedWeight, pack


def read_back(packed: PackedWeight) -> torch.Tensor:
    """Returns the weight [N, K] in float32, from panels as `PackedWeight` describes them."""
    codes_PNB = packed.codes_PNB
    pieces = [codes_PNB] if packed.bits == 8 else [((codes_PNB & 15) ^ 8) - 8, codes_PNB >> 4]
    codes_PNI = torch.cat(pieces, -1).float()
    size = codes_PNB.shape[2]
    weight_NK = torch.zeros(packed.num_outputs, packed.num_inputs)
    for piece in range(packed.pieces):
        panel, half = divmod(piece, len(pieces))
        group = min(piece // packed.pieces_per_group, len(packed.scales_GN) - 1)
        values = codes_PNI[panel, :, half * size : (half + 1) * size] * packed.scales_GN[group].float()[:, None]
        if packed.offsets_GN is not None:
            values = values + packed.offsets_GN[group].float()[:, None]
        at = torch.arange(piece * size, (piece + 1) * size)
        at = packed.columns[at] if packed.columns is not None else at.where(at < packed.num_inputs, -1)
        weight_NK[:, at[at >= 0].long()] = values[:, at >= 0]
    return weight_NK


@given(
    bits=st.sampled_from([4, 8]),
    groups=st.sampled_from([1, 2, 3, 9]),
    group_size=st.sampled_from([1, 8, 20, 32, 48, 64, 128]),
    offset=st.booleans(),
    ordered=st.booleans(),
    for_int8=st.booleans(),
    narrow=st.booleans(),
)
def test_what_is_read_back_is_the_weight(
    bits: int, groups: int, group_size: int, offset: bool, ordered: bool, for_int8: bool, narrow: bool
) -> None:
    inputs, lowest = groups * group_size, -(1 << bits - 1)
    codes = torch.randint(lowest, -lowest, (5, inputs), dtype=torch.int8)
    scales, offsets = torch.rand(5, groups), torch.randn(5, groups) if offset else None
    scales = scales.bfloat16().float() if narrow else scales
    weight = QuantizedWeight(bits, codes, scales, offsets, torch.randperm(inputs) if ordered else None)  # type: ignore[arg-type]
    packed = pack(weight, for_int8)
    assert torch.equal(read_back(packed), weight.dequantized())
    assert packed.codes_PNB.shape[2] in ((32,) if for_int8 else (16, 32, 64))


def test_scales_are_kept_in_16_bits_only_where_that_is_exact() -> None:
    codes = torch.zeros(2, 64, dtype=torch.int8)
    exact, half, inexact = torch.full((2, 1), 0.25), torch.full((2, 1), 1.0009765625), torch.full((2, 1), 0.1)
    found = [pack(QuantizedWeight(8, codes, scales)).scales_GN.dtype for scales in (exact, half, inexact)]
    assert found == [torch.bfloat16, torch.float16, torch.float32]
