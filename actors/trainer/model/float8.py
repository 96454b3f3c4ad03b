"""Linear layers with FP8 matrix products (Micikevicius et al. 2022). The forward pass uses E4M3, and gradients use
E5M2. Each tensor has one scale, computed from the tensor's current largest magnitude. Weights, sums and everything else
keep their precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raytide.core.errors import ConfigError

MULTIPLE = 16
"""The hardware requires each side of an FP8 product to be a multiple of this."""
FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2


def check_device(device: torch.device) -> None:
    """Raises ConfigError for a GPU without FP8 matrix products. A CPU is accepted for tests, although its FP8 matrix
    products are slow.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f'precision "fp8" needs a GPU of compute capability 8.9 (Ada, Hopper) or newer; this is {name}.',
            hint='Set precision "bf16".',
        )


def convert(layer: nn.Module) -> int:
    """Converts the layer's linear modules to FP8 in place, and returns the number of converted modules. Modules whose
    sizes are not multiples of MULTIPLE stay unchanged.
    """
    fit = [
        module
        for module in layer.modules()
        if type(module) is nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    ]
    for module in fit:
        setattr(module, "forward", _Forward(module))  # noqa: B010  parameters keep their names
    return len(fit)


class _Forward:
    def __init__(self, module: nn.Linear) -> None:
        self._module = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._module.weight, self._module.bias
        flat = x.flatten(0, -2)
        short = -flat.shape[0] % MULTIPLE
        padded = nn.functional.pad(flat, (0, 0, 0, short)) if short else flat
        out: Tensor = _Product.apply(padded, weight)  # type: ignore[no-untyped-call]
        out = (out[: flat.shape[0]] if short else out).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias


class _Product(torch.autograd.Function):
    """Returns x [N, K] times weight [M, K] transposed."""

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor) -> Tensor:
        ctx.save_for_backward(x_NK, weight_MK)
        return _multiply(x_NK, FORWARD, weight_MK.t(), FORWARD, x_NK.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_NK, weight_MK = ctx.saved_tensors
        grad_x_NK = _multiply(grads[0], GRADIENT, weight_MK, FORWARD, x_NK.dtype)
        return grad_x_NK, _multiply(grads[0].t(), GRADIENT, x_NK, FORWARD, weight_MK.dtype)


def _multiply(left: Tensor, left_type: torch.dtype, right: Tensor, right_type: torch.dtype, out: torch.dtype) -> Tensor:
    left_8, left_scale = _quantize(left, left_type)
    right_8, right_scale = _quantize(right, right_type)
    # The hardware needs a row-major left side and a column-major right side.
    return torch._scaled_mm(
        left_8.contiguous(), right_8.t().contiguous().t(), scale_a=left_scale, scale_b=right_scale, out_dtype=out
    )


def _quantize(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the tensor in FP8, and the scale by which it must be multiplied to restore its values."""
    largest = torch.finfo(dtype).max
    scale = value.abs().amax().float().clamp(min=1e-12) / largest
    return (value.float() / scale).clamp(-largest, largest).to(dtype), scale
