"""Reads modules stored in FP8 (e4m3), which are computed in the model's dtype: no integer code has their values."""

from __future__ import annotations

import math

import torch

from raytide.actors.models.quantized.cutting import Block
from raytide.actors.models.quantized.module_tensors import ModuleTensors
from raytide.core.errors import DataError

Tensor = torch.Tensor

_SCALES = ("weight_scale", "weight_scale_inv")
"""Both multiply: DeepSeek's `scale_inv` is the inverse of what divided."""


def read_float8(tensors: ModuleTensors, shape: tuple[int, int], block: tuple[int, int], part: Block) -> Tensor:
    """Returns a part of a weight [N, K] in float32: codes times the scale of the tensor, of the output, or of its
    block of outputs and inputs."""
    tensors.check_only(("weight", *_SCALES, "bias", "input_scale", "input_zero_point"))
    suffixes = [each for each in _SCALES if each in tensors]
    if len(suffixes) != 1:
        raise DataError(
            f"{tensors.where} is FP8 and has {' and '.join(suffixes) or 'no scale'}.",
            hint="Export or download the model again.",
        )
    (suffix,), (rows, columns) = suffixes, shape
    scale_shape = tensors.shape(suffix)
    scales = tensors.scales(suffix, *scale_shape)
    blocks = (math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    if (scale_shape == blocks and suffix == "weight_scale_inv") or scale_shape not in ((), (1,), (rows,), (rows, 1)):
        if scale_shape != blocks:
            raise DataError(
                f"{tensors.where}: {suffix} has shape {scale_shape}; blocks of {block[0]} x {block[1]} have {blocks}.",
                hint="The config's block size is another.",
            )
        for dim, own in enumerate((part.outputs, part.inputs)):
            index = torch.arange(*own).div(block[dim], rounding_mode="floor").to(scales.device)
            scales = scales.index_select(dim, index)
    elif scale_shape in ((rows,), (rows, 1)):
        scales = scales.view(rows, 1)[part.rows]
    weight_NK = tensors.integers("weight", rows, columns, dtype="F8_E4M3", where=(part.rows, part.columns)).float()
    if bool(weight_NK.isnan().any()):
        raise DataError(f"{tensors.where}.weight has numbers that are not finite.", hint="Quantize the model again.")
    return weight_NK.mul_(scales)
