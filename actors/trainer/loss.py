"""The loss: cross entropy summed over the targets that count; the caller divides by the global count."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["IGNORE", "loss_sum"]

IGNORE = -100
"""The target of a position that does not count."""


def loss_sum(x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor, softcap: float | None = None) -> Tensor:
    """In fp32, from the last hidden states and the head's weight."""
    logits_NV = F.linear(x_BTD.flatten(0, 1), head_VD).float()
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    return F.cross_entropy(logits_NV, targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")
