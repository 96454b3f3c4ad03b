"""Decides from the loss and the gradient norm of a batch whether the batch is applied. All ranks have the same loss and
norm.

The guard's state is a small tensor of fixed shape in the checkpoint. A resumed run therefore decides like an
uninterrupted run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from raytide.actors.trainer.types import StepResult
from raytide.core.errors import TrainError
from raytide.core.specs.train import GuardSpec

if TYPE_CHECKING:
    from torch import Tensor

HISTORY = 128
"""The number of losses in the saved state. It does not depend on the window, since a resume may change the spec."""
_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class GuardVerdict:
    kind: Literal["applied", "skipped", "stopped"]
    why: str = ""


APPLIED = GuardVerdict("applied")


class AnomalyGuard:
    def __init__(self, spec: GuardSpec) -> None:
        self.spec = spec
        self.skipped = 0
        """Steps that were not applied; the learning rate schedule lags behind the data by this number."""
        self._in_row = 0
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def judge(self, loss: float, grad_norm: float) -> GuardVerdict:
        """Returns the guard's verdict on one batch, and updates the guard's state."""
        why, policy = self._find_anomaly(loss, grad_norm)
        if policy == "ignore":
            self._in_row = 0
            self._losses.append(loss)
            return APPLIED
        if policy == "skip" and self._in_row < self.spec.max_skips:
            self._in_row += 1
            self.record_skip()
            return GuardVerdict("skipped", why)
        again = f", after {self._in_row} skipped in a row" if self._in_row else ""
        return GuardVerdict("stopped", why + again)

    def record_skip(self) -> None:
        """Counts a batch that was not applied. The learning rate schedule does not advance for such a batch.

        Call this for batches that the guard skips, and for batches that the loss scale skips. Only the guard's skips
        count towards max_skips.
        """
        self.skipped += 1

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state as one tensor `judged`, [2 + HISTORY] in fp64. It contains the number of skips, the number
        of consecutive skips, and the losses. The losses are oldest first and padded with NaN.
        """
        import torch

        empty = [math.nan] * (HISTORY - len(self._losses))
        judged = torch.tensor([self.skipped, self._in_row, *self._losses, *empty], dtype=torch.float64)
        return {"judged": judged}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        skipped, in_row, *losses = state["judged"].tolist()
        self.skipped, self._in_row = int(skipped), int(in_row)
        self._losses = deque((loss for loss in losses if not math.isnan(loss)), maxlen=HISTORY)

    def _find_anomaly(self, loss: float, grad_norm: float) -> tuple[str, Literal["skip", "stop", "ignore"]]:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"loss {loss} and gradient norm {grad_norm} are not both finite", self.spec.nan
        if self.spec.spike == "ignore" or len(self._losses) < self.spec.window:
            return "", "ignore"
        recent = list(self._losses)[-self.spec.window :]
        middle = median(recent)
        deviation = _SIGMA * median(abs(each - middle) for each in recent)
        limit = middle + max(self.spec.sigmas * deviation, self.spec.rise)
        if loss <= limit:
            return "", "ignore"
        return f"loss {loss:.4f} is a spike: the limit is {limit:.4f}, the median {middle:.4f}", self.spec.spike


def stopped_error(name: str, result: StepResult) -> TrainError:
    """Returns the error that ends a run if the guard's verdict on a batch is `stopped`."""
    return TrainError(
        f"step {result.step} of {name} was not applied: {result.why}.",
        hint="Lower optim.lr, lengthen the warm-up or train in fp32; guard.nan and guard.spike may skip such a batch. "
        "events.jsonl has its sample ids; the last checkpoint is intact.",
    )
