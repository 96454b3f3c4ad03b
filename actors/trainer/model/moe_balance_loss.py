"""The load-balancing loss of a router (Switch Transformer, equations 4 to 6).

Computed over all layers as in transformers, but per sequence, so that it does not depend on which sequences share a
microbatch. Each sequence is weighted by its number of targets, like everything in the summed loss.

Shapes: B sequences, T tokens of each, E experts, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytide.actors.trainer.model.loss import IGNORE


@dataclass(frozen=True, slots=True)
class Routing:
    """A layer's router probabilities and choices, in the order of the batch."""

    probabilities_NE: Tensor
    chosen_NX: Tensor


def load_balancing_loss(layers: Sequence[Routing], targets_BT: Tensor) -> Tensor:
    """Returns the loss summed over counted targets. With X experts per token, perfect balance gives X for each
    target."""
    counts_BT = targets_BT != IGNORE
    real_BT1 = _until_last(counts_BT).unsqueeze(-1).float()
    rows_B1 = len(layers) * real_BT1.sum(1).clamp(min=1.0)
    share_BE = torch.zeros(len(targets_BT), layers[0].probabilities_NE.shape[-1], device=targets_BT.device)
    probabilities_BE = torch.zeros_like(share_BE)
    for each in layers:
        probabilities_BTE = each.probabilities_NE.float().unflatten(0, targets_BT.shape)
        hits_NE = torch.zeros_like(each.probabilities_NE, dtype=torch.float32).scatter_(1, each.chosen_NX, 1.0)
        share_BE = share_BE + (hits_NE.unflatten(0, targets_BT.shape) * real_BT1).sum(1)
        probabilities_BE = probabilities_BE + (probabilities_BTE * real_BT1).sum(1)
    imbalance_B = (share_BE / rows_B1 * probabilities_BE / rows_B1).sum(-1) * share_BE.shape[-1]
    return (imbalance_B * counts_BT.sum(1)).sum()


def _until_last(counts_BT: Tensor) -> Tensor:
    """Returns True up to the last counted target; the rest is padding."""
    return counts_BT.flip(1).cumsum(1).flip(1) > 0
