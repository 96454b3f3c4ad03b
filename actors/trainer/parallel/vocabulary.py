"""The summed cross entropy under tensor parallelism: no rank has the logits of all tokens over all of the vocabulary.

Where the vocabulary divides evenly, a rank has its part of every token's logits, and all get the same loss; else it has
its own tokens' logits, and its part of the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raytide.actors.trainer.distributed.collectives import gather, local
from raytide.actors.trainer.model.loss import IGNORE, loss_sum

__all__ = ["VocabularyLoss"]


class VocabularyLoss:
    """In `Decoder.loss`'s form: x_BTD is this rank's piece of the sequence, the targets are those of all of it."""

    def __init__(self, group: dist.ProcessGroup, divided: bool) -> None:
        self.group, self.divided = group, divided
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def __call__(self, x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor, softcap: float | None = None) -> Tensor:
        if not self.divided:
            size = x_BTD.shape[1]
            mine_BT = targets_BT.narrow(1, self.rank * size, size)
            return loss_sum(x_BTD, local(head_VD), mine_BT, softcap)
        logits_NV = F.linear(gather(x_BTD, 1, self.group).flatten(0, 1), local(head_VD)).float()
        if softcap is not None:
            logits_NV = softcap * torch.tanh(logits_NV / softcap)
        first = self.rank * logits_NV.shape[1]
        loss: Tensor = _DividedCrossEntropy.apply(logits_NV, targets_BT.flatten(), first, self.group)  # type: ignore[no-untyped-call]
        return loss


class _DividedCrossEntropy(torch.autograd.Function):
    """Of logits of the ids from `first` on; the other ranks have the others. The gradient is that of the local ones."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        highest_N1 = logits_NV.amax(1, keepdim=True)
        dist.all_reduce(highest_N1, dist.ReduceOp.MAX, group=group)
        share_NV = (logits_NV - highest_N1).exp_()
        here_N = (targets_N >= first) & (targets_N < first + logits_NV.shape[1])
        column_N1 = (targets_N - first).masked_fill(~here_N, 0)[:, None]
        target_N = logits_NV.gather(1, column_N1)[:, 0].masked_fill(~here_N, 0.0)
        sums_2N = torch.stack((share_NV.sum(1), target_N))
        dist.all_reduce(sums_2N, group=group)
        counts_N = targets_N != IGNORE
        loss_N = sums_2N[0].log() + highest_N1[:, 0] - sums_2N[1]
        share_NV /= sums_2N[0][:, None]
        ctx.save_for_backward(share_NV, column_N1, here_N, counts_N)
        return loss_N.masked_fill(~counts_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        share_NV, column_N1, here_N, counts_N = ctx.saved_tensors
        change_NV = share_NV.scatter_add(1, column_N1, -here_N[:, None].to(share_NV.dtype))
        return change_NV * (counts_N[:, None] * gradients[0]), None, None, None
