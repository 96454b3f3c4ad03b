"""Computes matrix products with oneDNN on processors with AMX. oneDNN uses AMX's tiles; the C operators do not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from raytide.kernels import compiled, cpu
from raytide.kernels.registry import register

Tensor = torch.Tensor

_ROWS, _WIDTH = 64, 1024  # of the product that is measured
_WORTH = 1.2  # how much faster it has to be, so that noise does not decide


def _is_faster() -> bool:
    """Returns whether oneDNN is clearly faster than the C operators, by a measurement if the processor has AMX: some
    virtual machines hide AMX or make it slow.
    """
    try:
        if "amx_bf16" not in Path("/proc/cpuinfo").read_text() or not cpu.can_pack() or not compiled.can_run():
            return False
    except OSError:
        return False
    x, weight = (torch.randn(rows, _WIDTH, dtype=torch.bfloat16) for rows in (_ROWS, _WIDTH))
    return _WORTH * _least_s(cpu.linear(weight, None), x) < _least_s(compiled.linear(weight, None), x)


def _least_s(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    least = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        product(x)
        least = min(least, time.perf_counter() - began)
    return least


@register("linear", "cpu", priority=25, probe=_is_faster)
def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Returns a linear layer. A bfloat16 layer is computed by oneDNN. AMX does not support float32, so a float32 layer
    is computed by the C operators.
    """
    if weight.dtype == torch.bfloat16:
        return cpu.linear(weight, bias)
    return compiled.linear(weight, bias)
