"""What is private in torch or differs between 2.11 and 2.13, in one place, and why."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.tensor.debug
from torch.distributed.device_mesh import DeviceMesh

# 2.13 renamed both and warns at the old names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_forming = 0
_with_groups: list[DeviceMesh] = []
"""Since the group was joined. torch 2.11 keeps no groups in a mesh."""


def tell_meshes_apart() -> None:
    """Meshes made from now on equal none that was made before.

    torch takes two meshes of the same ranks for one and keeps what it worked out for the first: the shard of a rank
    that changed its number would be that of its old number (torch 2.13: a checkpoint with half of every tensor twice).
    """
    global _forming
    _forming += 1


def forget_meshes() -> None:
    """DTensor's caches keep every mesh, and a mesh its groups: their sockets would stay open, and peers that wait for
    this rank would not be woken."""
    for mesh in _with_groups:
        mesh._pg_registry.clear()
    _with_groups.clear()
    if (clear := getattr(torch.distributed.tensor.debug, "_clear_sharding_prop_cache", None)) is not None:
        clear()  # right without it; else every forming would leave its entries behind


def _identify(make: Any) -> Any:
    def init(self: DeviceMesh, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._thread_id = _forming  # part of equality and hash, and None but for torch's own tests
        if getattr(self, "_pg_registry", None):
            _with_groups.append(self)

    return init


DeviceMesh.__init__ = _identify(DeviceMesh.__init__)  # type: ignore[method-assign]
