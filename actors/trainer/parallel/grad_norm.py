"""The norm and clipping of the whole model's gradient, whatever part of it each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.model.transformer import Transformer


def square_sum(parts: Sequence[Transformer]) -> float:
    """Returns this rank's share of the squared norm. The sum over all ranks counts every element once."""
    weights = [weight for weight in counted(parts) if weight.grad is not None]
    if not weights:
        return 0.0
    norms = torch.stack(torch._foreach_norm([_local(weight.grad) for weight in weights])).double()
    copies = torch.tensor([_copies(weight) for weight in weights], dtype=torch.float64, device=norms.device)
    return float((norms.square() / copies).sum())


def clip(parts: Sequence[Transformer], norm: float, limit: float) -> None:
    """Scale the gradients so that their global norm, given as `norm`, is at most `limit`."""
    coefficient = limit / (norm + 1e-6)
    if coefficient < 1.0:
        grads = [_local(weight.grad) for part in parts for weight in part.parameters() if weight.grad is not None]
        torch._foreach_mul_(grads, coefficient)


def counted(parts: Sequence[Transformer]) -> Iterator[nn.Parameter]:
    """Yields all parameters except the last stage's copy of a tied embedding."""
    for part in parts:
        copied = part.arch.tied_embeddings and part.is_last and not part.is_first
        for name, weight in part.named_parameters():
            if not (copied and name == "embedding.weight"):
                yield weight


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _copies(weight: nn.Parameter) -> int:
    """Returns how many ranks hold the same elements of a parameter."""
    if not isinstance(weight, DTensor):
        return 1
    placed = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return math.prod(size for size, placement in placed if placement.is_replicate())
