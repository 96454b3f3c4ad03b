"""The mixed-precision policy, and the loss scale that keeps small gradients from vanishing in fp16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from raytide.core.errors import TrainError
from raytide.core.specs.train import Precision, TrainSpec

FIRST, SMALLEST, LARGEST = 2.0**16, 1.0, 2.0**24
GROW_AFTER = 2000
"""The number of successful steps in a row before the scale doubles."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.bfloat16}


def policy(precision: Precision) -> MixedPrecisionPolicy:
    """Returns FSDP's mixed-precision policy. Weights and gradient sums stay in fp32, and computation uses `precision`.
    With FP8, everything except the matrix products is computed in bf16.
    """
    if precision == "fp32":
        return MixedPrecisionPolicy()
    compute = torch.float16 if precision == "fp16" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def export_dtype(spec: TrainSpec) -> torch.dtype:
    """Returns the dtype of exported weights."""
    return _DTYPES[spec.export_dtype or spec.precision]


class GradScaler:
    """A dynamic loss scale for fp16. With other precisions the scale is 1.

    The scale doubles after many good steps and halves after an overflow. All ranks skip a step that overflows, because
    they decide by the same global gradient norm.
    """

    def __init__(self, precision: Precision) -> None:
        self.active = precision == "fp16"
        self.value = FIRST if self.active else 1.0
        self.good_steps = 0

    def overflowed(self, loss: float, grad_norm: float) -> bool:
        """Returns whether the gradients overflowed in fp16 although the loss is finite. The step must then be
        skipped.
        """
        return self.active and math.isfinite(loss) and not math.isfinite(grad_norm)

    def unscale(self, grads: Sequence[Tensor]) -> None:
        if self.active and grads:
            torch._foreach_mul_(list(grads), 1 / self.value)

    def record_good_step(self) -> None:
        if self.active:
            self.good_steps += 1
            if self.good_steps >= GROW_AFTER:
                self.value, self.good_steps = min(self.value * 2, LARGEST), 0

    def record_overflow(self, step: int) -> None:
        """Halves the scale. Raises TrainError if the scale is already the smallest one."""
        if self.value <= SMALLEST:
            raise TrainError(
                f"step {step} overflows in fp16 even with a loss scale of {self.value:g}.",
                hint='Set precision "bf16", or lower optim.lr.',
            )
        self.value, self.good_steps = self.value / 2, 0

    def state_dict(self) -> dict[str, Tensor]:
        return {"scale": torch.tensor([self.value, self.good_steps], dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if self.active:
            self.value, self.good_steps = float(state["scale"][0]), int(state["scale"][1])
