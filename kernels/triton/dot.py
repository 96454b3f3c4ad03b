"""The matrix product of a tile, which all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = bool(knobs.runtime.interpret)
"""True where kernels run in Triton's interpreter, whose bfloat16 products are wrong: operands are widened there."""


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """Returns a @ b in float32, with b in a's type; float32 operands are not rounded to TF32."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    else:
        b = b.to(a.dtype)
    return tl.dot(a, b, input_precision="ieee")
