"""One rank's part of a parameter: reach it, reduce over the ranks that hold the rest, cut it from the whole.

Optimisers compute on these plain tensors. It is exact for every layout, and free of DTensor's traps: in-place powers
that fail, fused kernels without a sharding rule, lists over two meshes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

__all__ = ["like", "local", "part", "square_sum", "sum_over", "whole", "without_dim"]


def local(tensor: Tensor) -> Tensor:
    """This rank's values, sharing their memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_dim(placement: Placement) -> int | None:
    """The tensor dimension that a placement cuts; FSDP over tensor parallel uses a strided kind of its own."""
    return None if placement.is_replicate() or placement.is_partial() else placement.dim  # type: ignore[attr-defined]


def sum_over(value: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
    """`value`, a sum over this rank's part of `dims` of the parameter, made the sum over the whole of them."""
    if isinstance(parameter, DTensor):
        for mesh_dim, placement in enumerate(parameter.placements):
            if shard_dim(placement) in dims and parameter.device_mesh.size(mesh_dim) > 1:
                dist.all_reduce(value, group=parameter.device_mesh.get_group(mesh_dim))
    return value


def square_sum(value: Tensor, parameter: Tensor) -> Tensor:
    """Of `value`, which is cut like the parameter, over all ranks: a scalar."""
    return sum_over(value.square().sum(), parameter, range(parameter.ndim))


def whole(value: Tensor, parameter: Tensor) -> Tensor:
    """All of a tensor of which this rank has `value`, cut like the parameter."""
    if not isinstance(parameter, DTensor):
        return value
    placed = like(value, parameter)
    assert isinstance(placed, DTensor)
    full: Tensor = placed.full_tensor()
    return full


def part(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of `full`, cut like the parameter, without communication."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    # A strided shard cuts what the plain shard of the same dimension, on a later mesh axis, has left.
    order = sorted(range(mesh.ndim), key=lambda axis: type(parameter.placements[axis]) is not Shard)
    for axis in order:
        dim = shard_dim(parameter.placements[axis])
        if dim is not None:
            pieces = torch.chunk(full, mesh.size(axis), dim)
            mine = coordinate[axis]
            full = pieces[mine] if mine < len(pieces) else full.narrow(dim, 0, 0)
    return full


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's `value` as the part of a tensor with the parameter's shape and layout."""
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def without_dim(value: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """As `like`, for a tensor that is the parameter reduced over `dim`: ranks along it hold the same values."""
    if not isinstance(parameter, DTensor):
        return value
    placements: list[Placement] = []
    for placement in parameter.placements:
        cut = shard_dim(placement)
        if cut is None or cut == dim:
            placements.append(Replicate())
        else:
            placements.append(placement if cut < dim else Shard(cut - 1))
    shape = torch.Size(size for index, size in enumerate(parameter.shape) if index != dim)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(value, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)
