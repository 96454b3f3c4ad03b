"""Local shards of parameters: access to them, reductions over the ranks with the other shards, and cutting shards from
a whole.

Optimizers compute on these plain tensors. The result is exact for every layout, and avoids DTensor's limits: failing
in-place powers, fused kernels without a sharding rule, lists over two meshes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of the tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_dim(placement: Placement) -> int | None:
    """Returns the tensor dimension that a placement shards, None if it shards none. FSDP over tensor parallelism uses a
    strided placement.
    """
    return None if placement.is_replicate() or placement.is_partial() else placement.dim  # type: ignore[attr-defined]


def sum_over(value: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
    """Adds up `value` in place over the ranks that share the parameter's dimensions `dims`, and returns it. Each rank's
    `value` is a sum over its own part of these dimensions.
    """
    if isinstance(parameter, DTensor):
        for mesh_dim, placement in enumerate(parameter.placements):
            if shard_dim(placement) in dims and parameter.device_mesh.size(mesh_dim) > 1:
                dist.all_reduce(value, group=parameter.device_mesh.get_group(mesh_dim))
    return value


def square_sum(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns the squared norm, over all ranks, of a tensor that is sharded like the parameter. `value` is this rank's
    shard.
    """
    return sum_over(value.square().sum(), parameter, range(parameter.ndim))


def whole(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns the whole of a tensor that is sharded like the parameter. `value` is this rank's shard."""
    if not isinstance(parameter, DTensor):
        return value
    placed = like(value, parameter)
    assert isinstance(placed, DTensor)
    full: Tensor = placed.full_tensor()
    return full


def part(full: Tensor, parameter: Tensor) -> Tensor:
    """Returns this rank's part of `full`, cut as the parameter is. Needs no communication."""
    if not isinstance(parameter, DTensor):
        return full
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    # A strided shard cuts what the plain shard of the same dimension, on a later mesh axis, left over.
    order = sorted(range(mesh.ndim), key=lambda axis: type(parameter.placements[axis]) is not Shard)
    for axis in order:
        dim = shard_dim(parameter.placements[axis])
        if dim is not None:
            pieces = torch.chunk(full, mesh.size(axis), dim)
            mine = coordinate[axis]
            full = pieces[mine] if mine < len(pieces) else full.narrow(dim, 0, 0)
    return full


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns this rank's `value` as a DTensor with the parameter's shape and layout."""
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
    """Returns `value`, this rank's part of a reduction over `dim` of the parameter, as a DTensor. It has the
    parameter's layout without that dimension: ranks that shard `dim` hold copies.
    """
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
