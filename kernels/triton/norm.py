"""RMSNorm and LayerNorm of a row, alone or after an addition to the residual stream.

One program computes one row, so its result does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from raytide.kernels import ref
from raytide.kernels.core import NormWeights
from raytide.kernels.triton.support import fits, gpu_variant

Tensor = torch.Tensor

_WIDEST = 16384  # numbers of a row that one program holds in registers
_PER_WARP = 1024


@triton.jit
def norm_kernel(
    x,
    delta,
    weight,
    bias,
    out,
    x_stride,
    delta_stride,
    size,
    eps,
    ADD: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    if ADD:
        added = values.to(tl.float32) + tl.load(delta + row * delta_stride + at, mask=inside, other=0.0).to(tl.float32)
        values = added.to(values.dtype)  # the moments are those of the stored sum
        tl.store(x + row * x_stride + at, values, mask=inside)
    wide = values.to(tl.float32)
    if IS_LAYER:
        wide = tl.where(inside, wide - tl.sum(wide) / size, 0.0)
    normed = wide / tl.sqrt(tl.sum(wide * wide) / size + eps)
    normed *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, normed.to(values.dtype), mask=inside)


@gpu_variant("norm", invariant=True)
def norm(x_TN: Tensor, by: NormWeights) -> Tensor:
    return _launch(x_TN, None, by) if _suits(x_TN, None, by) else ref.norm(x_TN, by)


@gpu_variant("add_norm", invariant=True)
def add_norm(x_TN: Tensor, delta_TN: Tensor, by: NormWeights) -> Tensor:
    return _launch(x_TN, delta_TN, by) if _suits(x_TN, delta_TN, by) else ref.add_norm(x_TN, delta_TN, by)


def _suits(x_TN: Tensor, delta_TN: Tensor | None, by: NormWeights) -> bool:
    return x_TN.dim() == 2 and x_TN.shape[1] <= _WIDEST and fits(x_TN, delta_TN, by.weight, by.bias)


def _launch(x_TN: Tensor, delta_TN: Tensor | None, by: NormWeights) -> Tensor:
    rows, size = x_TN.shape
    out_TN = x_TN.new_empty(rows, size)
    if not rows:
        return out_TN
    block = triton.next_power_of_2(size)
    with torch.cuda.device_of(x_TN):
        norm_kernel[(rows,)](
            x_TN,
            delta_TN if delta_TN is not None else x_TN,
            by.weight,
            by.bias if by.bias is not None else by.weight,
            out_TN,
            x_TN.stride(0),
            delta_TN.stride(0) if delta_TN is not None else 0,
            size,
            by.eps,
            ADD=delta_TN is not None,
            IS_LAYER=by.kind == "layer",
            HAS_BIAS=by.bias is not None,
            BLOCK=block,
            num_warps=min(max(block // _PER_WARP, 1), 16),
        )
    return out_TN


def rms_is_right(device: torch.device) -> bool:
    """Runs the RMSNorm kernel on one row. Returns whether the result agrees with the reference."""
    x_TN = torch.arange(1.0, 49.0, device=device)[None]
    by = NormWeights(x_TN[0], None, 1e-5)
    return bool(torch.allclose(_launch(x_TN, None, by), ref.norm(x_TN, by)))
