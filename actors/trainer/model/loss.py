"""The loss: cross entropy, summed over the targets that count. The caller divides the sum by the global number of these
targets.

The chunked version never holds the logits of all tokens. It computes gradients in the forward pass, while a chunk's
logits exist. The backward pass only scales these gradients. Gemma's soft-cap of the logits is supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

IGNORE = -100
"""The target of an ignored position."""


class Micro(NamedTuple):
    """A microbatch. Each tensor has the shape [B, T]: batch, time."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None
    """The number of each token's document in its row, ascending, if attention stays inside documents."""


def loss_sum(
    x_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor, softcap: float | None = None, *, chunk: int = 0
) -> Tensor:
    """Returns the summed loss in fp32. The logits of at most `chunk` tokens are in memory at once. If `chunk` is 0,
    there is no limit.

    A head that is sharded by tensor parallelism is not chunked, because each rank then has the logits of only a part of
    the vocabulary.
    """
    x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
    if chunk and not isinstance(head_VD, DTensor):
        loss: Tensor = _Chunked.apply(x_ND, head_VD, targets_N, softcap, chunk)  # type: ignore[no-untyped-call]
        return loss
    logits_NV = _cap(F.linear(x_ND, head_VD).float(), softcap)
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, head_VD: Tensor, targets_N: Tensor, softcap: float | None, chunk: int
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=x_ND.device)
        want_x, want_head = ctx.needs_input_grad[:2]
        grad_x_ND = torch.empty_like(x_ND) if want_x else None
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32) if want_head else None
        for start in range(0, x_ND.shape[0], chunk):
            x, targets = x_ND[start : start + chunk], targets_N[start : start + chunk]
            logits = _cap(F.linear(x, head_VD).float(), softcap)
            counts, at = targets != IGNORE, targets.clamp(min=0)[:, None]
            norm = logits.logsumexp(-1, keepdim=True)
            total += ((norm - logits.gather(1, at)).squeeze(1) * counts).sum()
            if not (want_x or want_head):
                continue
            gradient = _logit_gradient(logits, norm, at, counts, softcap).to(x.dtype)
            del logits
            if grad_x_ND is not None:
                torch.mm(gradient, head_VD, out=grad_x_ND[start : start + chunk])
            if grad_head_VD is not None:
                if x.dtype in (torch.float32, torch.float16):  # fp16 cannot hold a sum over many tokens
                    grad_head_VD.addmm_(gradient.t().float(), x.float())
                else:
                    grad_head_VD.add_(gradient.t() @ x)
        if grad_head_VD is not None and head_VD.dtype != torch.float16:  # the loss scale makes its sum small enough
            grad_head_VD = grad_head_VD.to(head_VD.dtype)
        ctx.save_for_backward(grad_x_ND, grad_head_VD)
        ctx.dtype = head_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_x_ND, grad_head_VD = (
            None if each is None else (each * grads[0].to(each.dtype)).to(ctx.dtype) for each in ctx.saved_tensors
        )
        return grad_x_ND, grad_head_VD, None, None, None


def _logit_gradient(
    logits_NV: Tensor, norm_N1: Tensor, at_N1: Tensor, counts_N: Tensor, softcap: float | None
) -> Tensor:
    """Returns the summed loss's gradient with respect to the logits before the soft-cap. Overwrites `logits_NV`."""
    cap_gradient_NV = None if softcap is None else 1 - (logits_NV / softcap).square()
    gradient_NV = logits_NV.sub_(norm_N1).exp_()
    gradient_NV.scatter_add_(1, at_N1, gradient_NV.new_full((1, 1), -1.0).expand(at_N1.shape))
    gradient_NV *= counts_N[:, None]
    return gradient_NV if cap_gradient_NV is None else gradient_NV.mul_(cap_gradient_NV)


def _cap(logits_NV: Tensor, softcap: float | None) -> Tensor:
    return logits_NV if softcap is None else softcap * torch.tanh(logits_NV / softcap)


@dataclass(frozen=True, slots=True)
class Routing:
    """The router probabilities of one layer and the experts that were chosen, in the order of the batch's tokens."""

    probabilities_NE: Tensor
    chosen_NX: Tensor


def load_balancing_loss(layers: Sequence[Routing], targets_BT: Tensor) -> Tensor:
    """Returns the load-balancing loss of the routers (Switch Transformer, equations 4 to 6), summed over the counted
    targets. If each token has X experts and the balance is perfect, the loss per target is X.

    The loss is computed over all layers together, as in transformers. It is computed for each sequence separately and
    therefore does not depend on which sequences share a microbatch. Each sequence is weighted by its number of counted
    targets.
    """
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
    """Returns a mask that is True up to the last counted target of each row; the rest is padding."""
    return counts_BT.flip(1).cumsum(1).flip(1) > 0
