"""GGUF's block formats as codes, scales and offsets. Layouts: `ggml-quants.c` of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_float(form: str) -> bool:
    return form in _FLOATS


def as_floats(raw: Tensor, form: str, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor of bytes as the floats that it holds, in their own dtype."""
    return raw.view(_FLOATS[form]).view(shape)


def as_quantized(blocks_NBb: Tensor, form: str) -> QuantizedWeight:
    """Returns a weight of rows of blocks, each of some bytes: [N, B, bytes]."""
    return _READERS[form](blocks_NBb)


def _q8_0(blocks_NBb: Tensor) -> QuantizedWeight:
    """A scale and 32 codes."""
    return QuantizedWeight(8, blocks_NBb[..., 2:].contiguous().view(torch.int8).flatten(1), _half(blocks_NBb, 0))


def _q4_0(blocks_NBb: Tensor) -> QuantizedWeight:
    """A scale and 32 codes minus 8: the low nibbles are the first 16."""
    return QuantizedWeight(4, _nibbles(blocks_NBb[..., 2:]), _half(blocks_NBb, 0))


def _q4_1(blocks_NBb: Tensor) -> QuantizedWeight:
    """A scale, a least value, and 32 codes."""
    scales, least = _half(blocks_NBb, 0), _half(blocks_NBb, 2)
    return QuantizedWeight(4, _nibbles(blocks_NBb[..., 4:]), scales, least + 8 * scales)


def _q4_k(blocks_NBb: Tensor) -> QuantizedWeight:
    """Eight groups of 32 codes, with scales and least values of 6 bits, and a scale for each of both."""
    scale, least = _half(blocks_NBb, 0)[..., None], _half(blocks_NBb, 2)[..., None]
    low, high, rest = blocks_NBb[..., 4:8], blocks_NBb[..., 8:12], blocks_NBb[..., 12:16]
    scales = scale * torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), -1)
    leasts = least * torch.cat((high & 63, (rest >> 4) | (high >> 6 << 4)), -1)
    codes = _nibbles(blocks_NBb[..., 16:].unflatten(2, (4, 32)).flatten(1, 2))
    return QuantizedWeight(4, codes, scales.flatten(1), (8 * scales - leasts).flatten(1))


def _q6_k(blocks_NBb: Tensor) -> QuantizedWeight:
    """Sixteen groups of 16 codes minus 32, with scales of 8 bits. A code's upper 2 bits lie apart from its lower 4."""
    lower = blocks_NBb[..., :128].unflatten(2, (2, 2, 32))  # two halves of 128 codes, 2 x 32 bytes each
    upper = blocks_NBb[..., 128:192].unflatten(2, (2, 1, 32))
    nibbles = torch.cat((lower & 15, lower >> 4), 3)  # [N, B, 2, 4, 32]
    bits = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    codes = (nibbles | bits << 4).to(torch.int8) - 32
    scales = _half(blocks_NBb, 208)[..., None] * blocks_NBb[..., 192:208].contiguous().view(torch.int8)
    return QuantizedWeight(8, codes.flatten(1), scales.flatten(1))


def _half(blocks_NBb: Tensor, at: int) -> Tensor:
    """Returns the float16 at a byte of each block, in float32 [N, B]."""
    return blocks_NBb[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(bytes_NBb: Tensor) -> Tensor:
    """Returns codes minus 8 as int8 [N, K]: in each block all low nibbles, then all high ones."""
    codes = torch.cat((bytes_NBb & 15, bytes_NBb >> 4), -1).to(torch.int8)
    return codes.sub_(8).flatten(1)


_READERS: Mapping[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
