"""Rounds a float weight to 8 or 4 bits: for heads that are quantised at load, and as the simplest way to compress."""

from __future__ import annotations

from typing import Literal

import torch

from raytide.core.errors import ConfigError
from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor


def round_to_nearest(
    weight_NK: Tensor, bits: Literal[4, 8], group_size: int | None = None, symmetric: bool = True
) -> QuantizedWeight:
    """Returns the weight rounded in groups of `group_size` inputs of an output; None makes each output one group.

    A symmetric scale is the group's largest amount / 127.5 (7.5 with 4 bits), as compressed-tensors has it: codes reach
    from -128 to 127. Otherwise the scale is the group's range, zero included, / 255 (15), and there are offsets.
    Raises ConfigError if the groups do not divide the inputs, or a number is not finite.
    """
    width, size = weight_NK.shape[1], group_size or weight_NK.shape[1]
    if size < 1 or width % size:
        raise ConfigError(
            f"A weight of {width} inputs has no groups of {size}.", hint="Choose a group size that divides the inputs."
        )
    groups_NGg = weight_NK.float().unflatten(1, (-1, size))
    if not groups_NGg.isfinite().all():
        raise ConfigError("A weight to be quantised has numbers that are not finite.", hint="Check the checkpoint.")
    lowest, steps = -(2 ** (bits - 1)), 2**bits - 1
    if symmetric:
        scales_NG1, offsets_NG1 = groups_NGg.abs().amax(-1, keepdim=True) / (steps / 2), None
        shifted = groups_NGg
    else:
        least = groups_NGg.amin(-1, keepdim=True).clamp(max=0)
        scales_NG1 = (groups_NGg.amax(-1, keepdim=True).clamp(min=0) - least) / steps
        zeros = torch.where(scales_NG1 > 0, lowest - least / scales_NG1, 0.0).round()  # the code of 0
        offsets_NG1 = -zeros * scales_NG1
        shifted = groups_NGg - offsets_NG1
    codes = torch.where(scales_NG1 > 0, shifted / scales_NG1, 0.0).round().clamp(lowest, -lowest - 1)
    offsets_NG = None if offsets_NG1 is None else offsets_NG1[..., 0].contiguous()
    return QuantizedWeight(bits, codes.to(torch.int8).flatten(1), scales_NG1[..., 0].contiguous(), offsets_NG)
