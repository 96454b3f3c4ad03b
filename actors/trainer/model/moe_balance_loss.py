"""The loss that keeps a router from choosing the same experts for all tokens (Switch Transformer, equations 4 to 6).

As transformers computes it over all layers, but for each sequence by itself: so it does not depend on which
sequences share a microbatch. It is weighted by a sequence's targets, as everything in the summed loss is.

Shapes: B sequences, T tokens of each, E experts, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytide.actors.trainer.model.loss import IGNORE

__all__ = ["Routing", "load_balancing_loss"]


@dataclass(frozen=True, slots=True)
class Routing:
    """What a layer's router did with its tokens, in the order of the batch."""

    likelihood_NE: Tensor
    chosen_NX: Tensor


def load_balancing_loss(layers: Sequence[Routing], targets_BT: Tensor) -> Tensor:
    """Summed over the targets that count. 1 for each is perfect balance with one expert a token, X with X of them."""
    counts_BT = targets_BT != IGNORE
    real_BT1 = _until_last(counts_BT).unsqueeze(-1).float()
    rows_B1 = len(layers) * real_BT1.sum(1).clamp(min=1.0)
    share_BE = torch.zeros(len(targets_BT), layers[0].likelihood_NE.shape[-1], device=targets_BT.device)
    likelihood_BE = torch.zeros_like(share_BE)
    for each in layers:
        likelihood_BTE = each.likelihood_NE.float().unflatten(0, targets_BT.shape)
        hits_NE = torch.zeros_like(each.likelihood_NE, dtype=torch.float32).scatter_(1, each.chosen_NX, 1.0)
        share_BE = share_BE + (hits_NE.unflatten(0, targets_BT.shape) * real_BT1).sum(1)
        likelihood_BE = likelihood_BE + (likelihood_BTE * real_BT1).sum(1)
    imbalance_B = (share_BE / rows_B1 * likelihood_BE / rows_B1).sum(-1) * share_BE.shape[-1]
    return (imbalance_B * counts_BT.sum(1)).sum()


def _until_last(counts_BT: Tensor) -> Tensor:
    """True up to the last target that counts: what comes after it only fills the sequence up."""
    return counts_BT.flip(1).cumsum(1).flip(1) > 0
