"""Quantisation-aware training (Jacob et al. 2018). Linear layers compute with quantised weights while they are trained.

The forward pass multiplies by exactly the numbers that the exporter's codes represent. Gradients are those of torchao's
fake quantiser, `clamp(Round(w / scale) + zero, least, most)` (pytorch/ao, BSD 3: `_quantize_affine_no_dtype_cast` and
`_Round` in torchao/quantization/quant_primitives.py). Gradients pass straight through the rounding. Gradients of
clamped weights are 0. Scales have no gradients.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytide.actors.models.quantized.codes import code_range, dequantized, nearest_integers, round_integers
from raytide.actors.trainer.model.transformer import Transformer
from raytide.core.specs.model import QatSpec
from raytide.kernels.ref import rounded


class FakeQuantizedLinear(nn.Linear):
    """A linear layer that computes with quantised weights while it is `active`. If the spec says so, its inputs are
    quantised as well.
    """

    def __init__(self, base: nn.Linear, qat: QatSpec, export_dtype: torch.dtype) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, base.weight.device)
        self.bits, self.group, self.symmetric = qat.bits, qat.group_size, qat.symmetric
        self.rounds_input, self.export_dtype = qat.activations == "int8", export_dtype
        self.active = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.active:
            return F.linear(input, self.weight, self.bias)
        out: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bits, self.group, self.symmetric, self.export_dtype, self.rounds_input
        )
        return out if self.bias is None else out + self.bias


def fake_quantized(
    weight_NK: Tensor, bits: int, group: int | None, symmetric: bool, export_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the float32 values that the weights will have after an export, and a mask of the weights that are not
    clamped.
    """
    exported_NK = weight_NK.to(export_dtype).float()
    found = round_integers(exported_NK, bits, group, export_dtype, symmetric=symmetric)
    least, most = code_range(bits)
    integers_NK = nearest_integers(exported_NK, found.scale_NG, found.zero_NG)
    return dequantized(found), (integers_NK >= least) & (integers_NK <= most)


class _Product(torch.autograd.Function):
    """Returns x times weight [N, K] transposed. The backward pass quantises the weight again, so that only the weight
    itself is saved, which FSDP frees in between.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        bits: int,
        group: int | None,
        symmetric: bool,
        export_dtype: torch.dtype,
        rounds_input: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_NK)
        ctx.scheme = bits, group, symmetric, export_dtype
        ctx.rounds_input = rounds_input
        quantized_NK, _ = fake_quantized(weight_NK, *ctx.scheme)
        used = _rounded(x, group) if rounds_input else x
        return F.linear(used, quantized_NK.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NK = ctx.saved_tensors
        quantized_NK, is_inside_NK = fake_quantized(weight_NK, *ctx.scheme)
        used = _rounded(x, ctx.scheme[1]) if ctx.rounds_input else x
        grad_NK = grads[0].flatten(0, -2).t() @ used.flatten(0, -2)
        return grads[0] @ quantized_NK.to(x.dtype), grad_NK * is_inside_NK, None, None, None, None, None


def prepare(part: Transformer, qat: QatSpec, targets: Collection[str], export_dtype: torch.dtype) -> None:
    """Replaces the linear modules at the paths `targets` by FakeQuantizedLinear modules."""
    for name, module in list(part.named_modules()):
        if name in targets:
            assert isinstance(module, nn.Linear)
            parent, _, leaf = name.rpartition(".")
            setattr(part.get_submodule(parent), leaf, FakeQuantizedLinear(module, qat, export_dtype))


def activate(parts: Sequence[Transformer], qat: QatSpec | None, step: int) -> None:
    """Switches quantisation on if `step` is at least the spec's `start_step`, and off otherwise. Steps are counted from
    0.
    """
    if qat is None:
        return
    for part in parts:
        for module in part.modules():
            if isinstance(module, FakeQuantizedLinear):
                module.active = step >= qat.start_step


def _rounded(x: Tensor, group: int | None) -> Tensor:
    """Returns the input as the engine's int8 path rounds it."""
    return rounded(x.flatten(0, -2), None, group).to(x.dtype).view_as(x)
