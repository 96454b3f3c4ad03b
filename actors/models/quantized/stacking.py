"""Stacks the quantized weights of modules that read the same input, so that one matrix product computes the outputs of
all these modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor


def can_stack(first: QuantizedWeight, second: QuantizedWeight) -> bool:
    """Returns whether two weights can be stacked. They need the same bits and the same order of columns, and the larger
    group size must be a multiple of the smaller one.
    """
    sizes = sorted((first.group_size, second.group_size))
    return first.bits == second.bits and sizes[1] % sizes[0] == 0 and _equal(first.columns_K, second.columns_K)


def stacked(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Returns one weight with the outputs of all parts. Its group size is the smallest group size of the parts."""
    if len(parts) == 1:
        return parts[0]
    groups = max(part.scales_NG.shape[1] for part in parts)
    offsets_NG = None
    if any(part.offsets_NG is not None for part in parts):
        offsets_NG = torch.cat([_widened(_offsets(part), groups) for part in parts])
    return QuantizedWeight(
        parts[0].bits,
        torch.cat([part.codes_NK for part in parts]),
        torch.cat([_widened(part.scales_NG, groups) for part in parts]),
        offsets_NG,
        parts[0].columns_K,
    )


def _offsets(part: QuantizedWeight) -> Tensor:
    return torch.zeros_like(part.scales_NG) if part.offsets_NG is None else part.offsets_NG


def _widened(values_NG: Tensor, groups: int) -> Tensor:
    return values_NG.repeat_interleave(groups // values_NG.shape[1], 1)


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
