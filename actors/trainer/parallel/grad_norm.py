"""The norm and the clipping of the whole model's gradient. They work for any distribution of the model over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.optim.state_offload import is_mapped, release


def square_sum(parts: Sequence[Transformer]) -> float:
    """Returns this rank's share of the gradient's squared norm. In the sum over all ranks, every element counts
    once.
    """
    weights = [weight for weight in counted(parts) if weight.grad is not None]
    if not weights:
        return 0.0
    norms = torch.stack(_norms([_local(weight.grad) for weight in weights])).double()
    copies = torch.tensor([_copies(weight) for weight in weights], dtype=torch.float64, device=norms.device)
    return float((norms.square() / copies).sum())


def clip(parts: Sequence[Transformer], norm: float, limit: float) -> None:
    """Scales the gradients so that their global norm is at most `limit`. `norm` is the current global norm."""
    coefficient = limit / (norm + 1e-6)
    if coefficient < 1.0:
        grads = [_local(weight.grad) for part in parts for weight in part.parameters() if weight.grad is not None]
        if not any(map(is_mapped, grads)):
            torch._foreach_mul_(grads, coefficient)
            return
        for grad in grads:
            grad.mul_(coefficient)
            release(grad)


def counted(parts: Sequence[Transformer]) -> Iterator[nn.Parameter]:
    """Yields all parameters except the last stage's copy of a tied embedding, which would count twice."""
    for part in parts:
        copied = part.arch.tied_embeddings and part.is_last and not part.is_first
        for name, weight in part.named_parameters():
            if not (copied and name == "embedding.weight"):
                yield weight


def _norms(grads: list[Tensor]) -> list[Tensor]:
    """Returns the norm of each gradient. Of gradients in a file, only one at a time is in memory."""
    if not any(map(is_mapped, grads)):
        return list(torch._foreach_norm(grads))
    norms: list[Tensor] = []
    for grad in grads:
        norms += torch._foreach_norm([grad])
        release(grad)
    return norms


def _local(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _copies(weight: nn.Parameter) -> int:
    """Returns the number of ranks that hold the same elements of a parameter as this rank."""
    if not isinstance(weight, DTensor):
        return 1
    placed = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return math.prod(size for size, placement in placed if placement.is_replicate())
