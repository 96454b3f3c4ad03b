"""Quantised linear layers in C (`c/quantized.c`). Weights have 8 or 4 bits. Inputs are floats or int8. Any shape is
supported.

With int8 inputs, the result is bit-identical to that of `invariant.quantized_linear` on every processor. With float
inputs, the result differs from the product with the dequantised weight only by rounding in float32. The result of a
row is bit-identical for every batch that contains this row.
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


class _Weight(ctypes.Structure):
    """The struct that quantized.c defines."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "bias", "columns")),
        *((name, ctypes.c_int64) for name in ("n", "k", "groups", "parts")),
        *((name, ctypes.c_int32) for name in ("bits", "int8", "half", "has_offsets")),
    ]


class QuantizedLinear:
    """A quantised linear layer. It packs its weight and does not keep the codes."""

    __slots__ = ("_call", "_kept", "here", "size", "width")

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, input_as: LinearInput) -> None:
        lib = compiled.loaded_library()
        self.size, self.width = weight.codes_NK.shape
        groups, parts = weight.scales_NG.shape[1], -(-weight.group_size // INPUT_GROUP)
        columns, wide_bias = _columns(weight, parts), None if bias is None else bias.float().contiguous()
        codes, scales = weight.codes_NK.contiguous(), _stored(weight.scales_NG)
        offsets = None if weight.offsets_NG is None else weight.offsets_NG.float().contiguous()
        starts = (_start(wide_bias), _start(columns))
        described = _Weight(None, *starts, self.size, self.width, groups, parts, weight.bits)
        described.int8, described.half = input_as == "int8", scales.dtype == torch.float16
        described.has_offsets = offsets is not None
        self.here = ctypes.addressof(described)
        packed = compiled.weights_memory.take(lib.quantized_bytes(self.here)).zero_()
        described.packed = packed.data_ptr()
        lib.pack_quantized(self.here, codes.data_ptr(), scales.data_ptr(), _start(offsets))
        self._kept, self._call = (packed, columns, wide_bias, described), lib.quantized_linear

    def __call__(self, x_TK: Tensor) -> Tensor:
        dtype, width = x_TK.dtype, self.width
        is_bf16 = dtype is torch.bfloat16
        x = (x_TK if is_bf16 else x_TK.float()).contiguous()
        rows = x.numel() // width
        out = torch.empty(rows, self.size, dtype=x.dtype)
        if self._call(self.here, x.data_ptr(), out.data_ptr(), rows, is_bf16) != 0:
            raise MemoryError(f"quantized_linear: no memory for {rows} rows of {width} inputs")
        if x.ndim != 2:
            out = out.view(*x.shape[:-1], self.size)
        return out if out.dtype is dtype else out.to(dtype)


@register("quantized_linear", "cpu", priority=20, probe=compiled.can_run, invariant=True)
def quantized_linear(weight: QuantizedWeight, bias: Tensor | None, input_as: LinearInput) -> Callable[[Tensor], Tensor]:
    return QuantizedLinear(weight, bias, input_as)


def _start(array: Tensor | None) -> int | None:
    return None if array is None else array.data_ptr()


def _stored(scales_NG: Tensor) -> Tensor:
    """Returns the scales in float16 if that is exact, as it is for most files; else in float32."""
    halves_NG = scales_NG.half()
    return (halves_NG if torch.equal(halves_NG.float(), scales_NG.float()) else scales_NG.float()).contiguous()


def _columns(weight: QuantizedWeight, parts: int) -> Tensor | None:
    """Returns the input that each packed column belongs to, -1 for padding of a group; None if columns are in order and
    no group is padded.
    """
    width, size = weight.codes_NK.shape[1], weight.group_size
    if weight.columns_K is None and size % INPUT_GROUP == 0:
        return None
    columns = torch.arange(width) if weight.columns_K is None else weight.columns_K
    padded = F.pad(columns.unflatten(0, (-1, size)), (0, parts * INPUT_GROUP - size), value=-1)
    return padded.to(torch.int32).contiguous()
