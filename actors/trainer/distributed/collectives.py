"""Collectives along one dimension of a tensor, with gradients. The backward pass of an all-gather is a reduce-scatter,
and vice versa.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from raytide.actors.trainer.distributed import torch_compat


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns all ranks' parts, joined along `dim`. The backward pass sums gradients over the ranks, so every rank must
    use the result.
    """
    out: Tensor = _AllGather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sums `x` over the ranks and returns this rank's part of the sum, cut along `dim`. The backward pass is
    `gather`.
    """
    out: Tensor = _ReduceScatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's local tensor of a parameter. The parameter is sharded or replicated over the tensor-parallel
    axis. If it is replicated, the backward pass treats this rank's gradient as a partial sum.
    """
    assert isinstance(parameter, DTensor), "something has put a plain tensor in its place, as torch's replicate does"
    placement = parameter.placements[0]
    return parameter.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Returns the same as `gather`, without gradients."""
    world = dist.get_world_size(group)
    parts = x.new_empty(world * x.shape[0], *x.shape[1:])
    torch_compat.all_gather(parts, x.contiguous(), group=group)
    by_rank: Tensor = parts.unflatten(0, (world, -1))
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def summed(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sums `x` over the ranks and returns this rank's part of the sum, cut along `dim`. In contrast to `scatter`, the
    result has no gradients.
    """
    world = dist.get_world_size(group)
    parts = x.unflatten(dim, (world, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    torch_compat.reduce_scatter(out, parts.flatten(0, 1), group=group)
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gathered(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return summed(gradients[0], ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return summed(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradients[0], ctx.dim, ctx.group), None, None
