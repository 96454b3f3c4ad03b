"""Rounds weights to integer codes with scales, and packs the codes, in the format of compressed-tensors.

Shape suffixes: N outputs, K inputs, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

_WORD_BITS = 32
_E4M3_MAX = 448.0


@dataclass(frozen=True, slots=True)
class RoundedWeight:
    """A rounded weight: `weight = (codes - zero) * scale`, with one zero point and one scale for each group."""

    codes_NK: Tensor
    """Signed codes: int8, or float8_e4m3fn."""
    scale_NG: Tensor
    zero_NG: Tensor | None = None


def round_integers(
    weight_NK: Tensor, bits: int, group: int | None, scale_dtype: torch.dtype, *, symmetric: bool = True
) -> RoundedWeight:
    """Rounds float32 weights to the nearest integer codes from -2^(bits-1) to 2^(bits-1) - 1. `group` is the number of
    inputs in a group. If it is None, each row is one group.

    The scale is `range / (2^bits - 1)`, as in the format's own writers, so that the smallest code occurs. The scale is
    rounded to `scale_dtype` before the weights are divided by it.
    """
    least, most = code_range(bits)
    groups_NGg = weight_NK.reshape(len(weight_NK), -1, group or weight_NK.shape[1])
    if symmetric:
        scale_NG = groups_NGg.abs().amax(-1) / ((most - least) / 2)
    else:
        low_NG, high_NG = groups_NGg.amin(-1).clamp(max=0.0), groups_NGg.amax(-1).clamp(min=0.0)
        scale_NG = (high_NG - low_NG) / (most - least)
    scale_NG, zero_NG = _rounded(scale_NG, scale_dtype), None
    if not symmetric:
        zero_NG = (least - low_NG / scale_NG.float()).round_().clamp_(least, most).to(torch.int8)
    codes_NK = nearest_integers(weight_NK, scale_NG, zero_NG).clamp_(least, most).to(torch.int8)
    return RoundedWeight(codes_NK, scale_NG, zero_NG)


def code_range(bits: int) -> tuple[int, int]:
    """Returns the smallest and the largest integer code of this many bits."""
    return -(1 << bits - 1), (1 << bits - 1) - 1


def nearest_integers(weight_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None) -> Tensor:
    """Returns `weight / scale + zero`, rounded to the nearest integers, as float32. The caller clamps these integers to
    the code range to get the codes.
    """
    codes_NGg = weight_NK.reshape(*scale_NG.shape, -1) / scale_NG.float()[..., None]
    if zero_NG is not None:
        codes_NGg = codes_NGg + zero_NG.float()[..., None]
    return codes_NGg.round_().reshape(weight_NK.shape)


def round_fp8(weight_NK: Tensor, scale_dtype: torch.dtype) -> RoundedWeight:
    """Rounds float32 weights to E4M3 with one scale for each output."""
    scale_N1 = _rounded(weight_NK.abs().amax(-1, keepdim=True) / _E4M3_MAX, scale_dtype)
    codes = (weight_NK / scale_N1.float()).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return RoundedWeight(codes.to(torch.float8_e4m3fn), scale_N1)


def dequantized(rounded: RoundedWeight) -> Tensor:
    """Returns the float32 weights [N, K] that the codes stand for."""
    n, k = rounded.codes_NK.shape
    codes = rounded.codes_NK.float().reshape(n, rounded.scale_NG.shape[1], -1)
    if rounded.zero_NG is not None:
        codes = codes - rounded.zero_NG.float()[..., None]
    return (codes * rounded.scale_NG.float()[..., None]).reshape(n, k)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Packs signed codes [R, C] into int32 words [R, ceil(C * bits / 32)]. An offset makes the codes unsigned. The
    first code is in the lowest bits of a word.
    """
    per_word = _WORD_BITS // bits
    rows, columns = codes.shape
    unsigned = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    unsigned[:, :columns] = codes.to(torch.int64) + (1 << bits - 1)
    shifts = torch.arange(per_word) * bits
    words = (unsigned.view(rows, -1, per_word) << shifts).sum(-1)
    # Words above 2^31 are negative as int32.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the scales in their dtype. A scale of 0 becomes the dtype's epsilon, as in the format's own writers."""
    rounded = scale.to(dtype)
    return rounded.masked_fill(rounded == 0, torch.finfo(dtype).eps)
