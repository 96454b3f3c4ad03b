"""The matrix product of two tiles, which all kernels use."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""True if kernels run in Triton's interpreter. Its bfloat16 products are wrong, so operands are widened there."""


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Returns a @ b in float32, after b is cast to a's type. Float32 operands are not rounded to TF32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    else:
        b = b.to(a.dtype)
    return tl.dot(a, b, input_precision="ieee")
