"""Workarounds for limits of torch's private APIs, and for differences between torch 2.11 and 2.13."""

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
"""Meshes made since the group was joined. torch 2.11 keeps no groups in a mesh."""


def tell_meshes_apart() -> None:
    """Makes torch treat every mesh that is created after this call as unequal to all earlier meshes.

    Torch otherwise treats two meshes of the same ranks as equal, and reuses what it cached for the first one. A process
    that has another rank now would get the shards of its old rank. With torch 2.13, this wrote checkpoints with half of
    every tensor twice.
    """
    global _forming
    _forming += 1


def count_groups_from_zero() -> None:
    """Resets torch's counter of process groups. The next process group then has the same name as the first group of a
    new process.

    Ranks find each other by the group's name. If a rank dies while a group forms, the name is used up all the same.
    Without a reset, the survivors would use the next name, but the replacement process would use the first one.
    """
    torch.distributed.distributed_c10d._world.group_count = 0


def forget_meshes() -> None:
    """Clears DTensor's caches. The caches keep every mesh alive, together with the sockets of its groups. While the
    sockets are open, peers that wait for this rank do not wake.
    """
    for mesh in _with_groups:
        mesh._pg_registry.clear()
    _with_groups.clear()
    if (clear := getattr(torch.distributed.tensor.debug, "_clear_sharding_prop_cache", None)) is not None:
        clear()  # optional: otherwise every generation would leave cache entries behind


def _identify(make: Any) -> Any:
    def init(self: DeviceMesh, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._thread_id = _forming  # part of equality and hash, otherwise used by torch's tests only
        if getattr(self, "_pg_registry", None):
            _with_groups.append(self)

    return init


DeviceMesh.__init__ = _identify(DeviceMesh.__init__)  # type: ignore[method-assign]
