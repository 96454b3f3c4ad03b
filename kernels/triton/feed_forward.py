"""Two operators of feed-forward layers: activate(gate) * up in one pass, and all experts of a mixture.

The experts are computed in one call of torch's grouped product, so the host does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from raytide.kernels import ref
from raytide.kernels.core import Activation
from raytide.kernels.triton.support import fits, gpu_variant

Tensor = torch.Tensor

_BLOCK = 1024
_ALIGNMENT = 16  # bytes of a weight's row, which the grouped product asks for


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
        with torch.cuda.device_of(gate_up_T2F):
            activate_mul_kernel[grid](gate_up_T2F, out_TF, gate_up_T2F.stride(0), size, KIND=kind, BLOCK=_BLOCK)
    return out_TF


@gpu_variant("experts")
def experts(gate_up_E2FN: Tensor, down_ENF: Tensor, kind: Activation) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns a function with the same interface as the function that `ref.experts` returns. The function sorts the
    pairs (token, chosen expert) by expert, so that each expert's rows are adjacent.
    """
    if any(weight.shape[2] * weight.element_size() % _ALIGNMENT for weight in (gate_up_E2FN, down_ENF)):
        return ref.experts(gate_up_E2FN, down_ENF, kind)
    gate_up_EN2F, down_EFN = gate_up_E2FN.transpose(1, 2), down_ENF.transpose(1, 2)
    every_E = torch.arange(len(gate_up_E2FN), device=gate_up_E2FN.device)

    def apply(x_TN: Tensor, chosen_TX: Tensor, weights_TX: Tensor) -> Tensor:
        tokens, per_token = chosen_TX.shape
        sorted_experts, order = chosen_TX.flatten().sort(stable=True)
        ends_E = torch.searchsorted(sorted_experts, every_E, right=True).to(torch.int32)
        hidden = activate_mul(F.grouped_mm(x_TN[order // per_token], gate_up_EN2F, offs=ends_E), kind)
        out = F.grouped_mm(hidden, down_EFN, offs=ends_E) * weights_TX.flatten()[order, None]
        by_token = torch.empty_like(out).index_copy_(0, order, out).view(tokens, per_token, -1)
        return by_token.sum(1).to(x_TN.dtype)

    return apply
