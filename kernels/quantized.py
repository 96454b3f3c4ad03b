"""Quantised linears in C (`c/quantized.c`): weights of 8 and 4 bits, with float inputs or int8 ones, any shape.

With int8 inputs the result is that of `invariant.quantized_linear` to the bit, on every processor. With float inputs it
is within float32's rounding of the product with the dequantised weight. Rows are independent of each other to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F

from raytide.kernels import compiled
from raytide.kernels.core import LinearInput, QuantizedWeight
from raytide.kernels.ref import INPUT_GROUP
from raytide.kernels.registry import register

Tensor = torch.Tensor

_ALIGNMENT = 64  # bytes: a vector of weights never straddles two cache lines


class _Weight(ctypes.Structure):
    """The struct of quantized.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "offsets", "bias", "columns")),
        *((name, ctypes.c_int64) for name in ("n", "k", "groups", "parts")),
        *((name, ctypes.c_int32) for name in ("bits", "int8")),
    ]


@register("quantized_linear", "cpu", priority=20, probe=compiled.can_run, invariant=True)
def quantized_linear(weight: QuantizedWeight, bias: Tensor | None, input_as: LinearInput) -> Callable[[Tensor], Tensor]:
    """Packs the weight once; the codes are not kept."""
    lib = compiled.loaded_library()
    (size, width), groups, is_int8 = weight.codes_NK.shape, weight.scales_NG.shape[1], input_as == "int8"
    parts = -(-weight.group_size // INPUT_GROUP)
    packed = torch.zeros(lib.quantized_bytes(size, groups * parts, weight.bits) + _ALIGNMENT, dtype=torch.uint8)
    start = packed.data_ptr() + -packed.data_ptr() % _ALIGNMENT
    codes_NK = weight.codes_NK.contiguous()
    lib.pack_quantized(codes_NK.data_ptr(), start, size, width, weight.group_size, weight.bits, is_int8)
    scales, offsets = _panels(weight.scales_NG, lib.panel()), _panels(weight.offsets_NG, lib.panel())
    columns, wide_bias = _columns(weight, parts), None if bias is None else bias.float().contiguous()
    kept = packed, scales, offsets, columns, wide_bias
    described = _Weight(start, *map(_start, (scales, offsets, wide_bias, columns)), size, width, groups, parts)
    described.bits, described.int8 = weight.bits, is_int8
    here, call = ctypes.addressof(described), lib.quantized_linear

    def apply(x_TK: Tensor, kept: object = (kept, described)) -> Tensor:
        x = (x_TK if x_TK.dtype == torch.bfloat16 else x_TK.float()).contiguous()
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
        if call(here, x.data_ptr(), out.data_ptr(), x.numel() // width, x.dtype == torch.bfloat16) != 0:
            raise MemoryError(f"quantized_linear: no memory for {x.numel() // width} rows of {width} inputs")
        return out.to(x_TK.dtype)

    return apply


def _start(array: Tensor | None) -> int | None:
    return None if array is None else array.data_ptr()


def _panels(numbers_NG: Tensor | None, panel: int) -> Tensor | None:
    """Returns the numbers as [panel, group, output of the panel], the last panel filled up with zeros."""
    if numbers_NG is None:
        return None
    padded = F.pad(numbers_NG.float(), (0, 0, 0, -numbers_NG.shape[0] % panel))
    panels: Tensor = padded.unflatten(0, (-1, panel)).transpose(1, 2).contiguous()
    return panels


def _columns(weight: QuantizedWeight, parts: int) -> Tensor | None:
    """Returns the input of each packed column, -1 where a group is filled up; None if they are all in order."""
    width, size = weight.codes_NK.shape[1], weight.group_size
    if weight.columns_K is None and size % INPUT_GROUP == 0:
        return None
    columns = torch.arange(width) if weight.columns_K is None else weight.columns_K
    padded = F.pad(columns.unflatten(0, (-1, size)), (0, parts * INPUT_GROUP - size), value=-1)
    return padded.to(torch.int32).contiguous()
