"""Collectives along a dimension of a tensor, with gradients: what is gathered forward is summed and cut backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from raytide.actors.trainer.distributed import torch_compat

__all__ = ["gather", "gathered", "local", "scatter", "summed"]


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' parts of `dim`, in their order. Each rank's gradient of the whole is summed: all must use it."""
    out: Tensor = _AllGather.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of `dim` of the ranks' sum; the inverse of `gather`."""
    out: Tensor = _ReduceScatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def local(parameter: Tensor) -> Tensor:
    """A rank's share of a parameter of the tensor axis. That of a replicated one gets a gradient of the rank's own work
    only, a partial sum."""
    assert isinstance(parameter, DTensor), "something has put a plain tensor in its place, as torch's replicate does"
    placement = parameter.placements[0]
    return parameter.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])


def gathered(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """As `gather`, without gradients."""
    world = dist.get_world_size(group)
    parts = x.new_empty(world * x.shape[0], *x.shape[1:])
    torch_compat.all_gather(parts, x.contiguous(), group=group)
    by_rank: Tensor = parts.unflatten(0, (world, -1))
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def summed(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """As `scatter`, without gradients."""
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
