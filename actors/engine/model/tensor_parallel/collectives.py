"""The sums and gathers among the members of one model: gloo on CPUs, NCCL on GPUs.

The group is no global one of torch.distributed, so that a process may hold several engines, or a trainer beside one.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from raytide.actors.engine.model.tensor_parallel.shard import ModelShard
from raytide.actors.models.architecture import Architecture

Tensor = torch.Tensor

_JOIN_TIMEOUT = timedelta(seconds=60)
_HANG_TIMEOUT = timedelta(seconds=30)
"""For a member that hangs; one that ends is noticed at once. It is below the time after which a replica without
progress is replaced, so that the group ends its members itself."""


def open_store(host: str) -> TCPStore:
    """Opens the rendezvous of a group on a free port of this address alone. It lives as long as the object."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_JOIN_TIMEOUT,
        master_listen_fd=listening.detach(),
    )


def connect_store(host: str, port: int) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=_JOIN_TIMEOUT)


class Collectives:
    """One member's end of the group. `ordered` sums by rank, with the same bits in every batch."""

    def __init__(
        self, store: Store, shard: ModelShard, device: torch.device, *, own_host: str, ordered: bool = False
    ) -> None:
        self.shard, self._device = shard, device
        self._ordered = ordered and shard.size > 2  # two numbers have one sum
        if device.type == "cuda":
            torch.cuda.set_device(device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _JOIN_TIMEOUT
            self._group: Any = dist.ProcessGroupNCCL(store, shard.rank, shard.size, nccl)
        else:
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
            gloo._timeout = _HANG_TIMEOUT
            self._group = dist.ProcessGroupGloo(store, shard.rank, shard.size, gloo)

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum over all members, which may be written in place."""
        if not partial.numel():
            return partial
        partial = partial.contiguous()
        if not self._ordered:
            self._group.allreduce([partial]).wait()
            return partial
        parts = [torch.empty_like(partial) for _ in range(self.shard.size)]
        self._group.allgather([parts], [partial]).wait()
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather_vocabulary(self, own_RV: Tensor, arch: Architecture) -> Tensor:
        """Returns all members' columns of logits on the leader; elsewhere, the own ones."""
        shard, rows = self.shard, own_RV.shape[0]
        if not rows:
            return own_RV.new_empty(0, arch.vocab_size)
        widths = [
            end - first for first, end in (ModelShard(i, shard.size).part(arch.vocab_size) for i in range(shard.size))
        ]
        padded = own_RV.new_zeros(rows, max(widths))
        padded[:, : own_RV.shape[1]] = own_RV
        options = dist.GatherOptions()
        options.rootRank = 0
        if shard.rank:
            self._group.gather([], [padded], options).wait()
            return own_RV
        parts = [torch.empty_like(padded) for _ in range(shard.size)]
        self._group.gather([parts], [padded], options).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def gather_bytes(self, own: Tensor) -> list[Tensor]:
        """Returns all members' bytes, of equal number, on the leader; elsewhere, nothing."""
        own = own.to(self._device)
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [] if self.shard.rank else [torch.empty_like(own) for _ in range(self.shard.size)]
        self._group.gather([parts] if parts else [], [own], options).wait()
        return [part.cpu() for part in parts]

    def scatter_bytes(self, parts: list[Tensor], size: int) -> Tensor:
        """Returns this member's part of those that the leader gives, by rank."""
        own = torch.empty(size, dtype=torch.uint8, device=self._device)
        options = dist.ScatterOptions()
        options.rootRank = 0
        self._group.scatter([own], [[part.to(self._device) for part in parts]] if parts else [], options).wait()
        return own.cpu()
