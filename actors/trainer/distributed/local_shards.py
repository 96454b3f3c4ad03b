"""Local shards of parameters: access to a shard, reductions over the ranks that hold the other shards, and cutting a
shard from a whole tensor.

Optimizers compute on these plain tensors. The result is exact for every layout. Plain tensors avoid three limits of
DTensors: in-place powers fail, some fused kernels have no sharding rule, and functions that take a list of tensors
accept only DTensors of the same mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of the tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_dim(placement: Placement) -> int | None:
    """Returns the tensor dimension that a placement shards. Returns None if it shards none. Strided placements, which
    FSDP uses over tensor parallelism, are included.
    """
    return None if placement.is_replicate() or placement.is_partial() else placement.dim  # type: ignore[attr-defined]


def sum_over(value: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
    """Sums `value` in place over the ranks that shard the parameter's dimensions `dims`, and returns it. The `value` of
    a rank is a sum over the rank's own part of these dimensions.
    """
    if isinstance(parameter, DTensor):
        for mesh_dim, placement in enumerate(parameter.placements):
            if shard_dim(placement) in dims and parameter.device_mesh.size(mesh_dim) > 1:
                dist.all_reduce(value, group=parameter.device_mesh.get_group(mesh_dim))
    return value


def square_sum(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns the squared norm of a sharded tensor, summed over all ranks. The tensor is sharded like the parameter,
    and `value` is this rank's shard of the tensor.
    """
    return sum_over(value.square().sum(), parameter, range(parameter.ndim))


def whole(value: Tensor, parameter: Tensor) -> Tensor:
    """Gathers and returns the whole tensor of which `value` is this rank's shard. The tensor is sharded like the
    parameter.
    """
    if not isinstance(parameter, DTensor):
        return value
    placed = like(value, parameter)
    assert isinstance(placed, DTensor)
    full: Tensor = placed.full_tensor()
    return full


def part(full: Tensor, parameter: Tensor) -> Tensor:
    """Returns this rank's shard of `full`, cut in the same way as the parameter. Needs no communication."""
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
    """Returns this rank's shard `value` as a DTensor with the parameter's shape and layout."""
    if not isinstance(parameter, DTensor):
        return value
    return _placed(value, parameter, parameter.placements, parameter.shape, parameter.stride())


def without_dim(value: Tensor, parameter: Tensor, dim: int) -> Tensor:
    """Returns a DTensor that contains the result of a reduction over the dimension `dim` of `parameter`. `value` is
    this rank's part of the result.

    The DTensor has the parameter's layout without `dim`. If `dim` is sharded over several ranks, each of these ranks
    has a copy of the result.
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
    return _placed(value, parameter, placements, shape, stride)


def _placed(
    value: Tensor, parameter: DTensor, placements: Sequence[Placement], shape: torch.Size, stride: Sequence[int]
) -> DTensor:
    """Returns `value` as a DTensor where it is. `DTensor.from_local` would copy it to the mesh's device."""
    spec = DTensorSpec(parameter.device_mesh, tuple(placements), TensorMeta(shape, tuple(stride), value.dtype))
    return DTensor(value.detach(), spec, requires_grad=False)
