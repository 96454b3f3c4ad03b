"""The gate of a feed-forward layer: activate(gate) * up in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raytide.kernels import ref
from raytide.kernels.core import Activation
from raytide.kernels.triton.support import fits, gpu_variant

Tensor = torch.Tensor

_BLOCK = 1024


@triton.jit
def activate_mul_kernel(gate_up, out, row_stride, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + at, mask=inside, other=0.0)
    if KIND == "silu":
        gate = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # x * (1 + tanh(y)) / 2 = x * sigmoid(2 y)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out + row * size + at, (gate * up.to(tl.float32)).to(up.dtype), mask=inside)


@gpu_variant("activate_mul", invariant=True)
def activate_mul(gate_up_T2F: Tensor, kind: Activation) -> Tensor:
    if gate_up_T2F.dim() != 2 or not fits(gate_up_T2F):
        return ref.activate_mul(gate_up_T2F, kind)
    rows, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    out_TF = gate_up_T2F.new_empty(rows, size)
    if rows:
        grid = (rows, triton.cdiv(size, _BLOCK))
        activate_mul_kernel[grid](gate_up_T2F, out_TF, gate_up_T2F.stride(0), size, KIND=kind, BLOCK=_BLOCK)
    return out_TF
