"""The communication among the member processes of one model, with gloo on CPUs and NCCL on GPUs: sums, gathers, and
transfers from one pipeline stage to the next.

The process group is not torch.distributed's global one. A process may therefore hold several engines, or a trainer and
an engine.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from raytide.actors.engine.model.parallel.shard import ModelShard
from raytide.actors.models.architecture import Architecture

Tensor = torch.Tensor

_JOIN_TIMEOUT = timedelta(seconds=60)
_HANG_TIMEOUT = timedelta(seconds=30)
"""The timeout for a member that hangs; one that ends is noticed at once. It is shorter than the time after which a
replica without progress is replaced, so that the group ends its members itself.
"""
_STAGE_TIMEOUT = timedelta(seconds=600)
"""The timeout for a stage that waits for earlier stages, which may compute a long prompt. A replica that hangs is
replaced sooner than that.
"""


def open_store(host: str) -> TCPStore:
    """Opens the rendezvous store of a group on a free port of `host`. The store listens on no other address, and lives
    as long as the returned object.
    """
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
    """One member's access to the group. If `ordered` is true, sums add their terms in the order of ranks, so that the
    bits of a sum do not depend on the batch.
    """

    def __init__(
        self, store: Store, shard: ModelShard, device: torch.device, *, own_host: str, ordered: bool = False
    ) -> None:
        self.shard, self._device, self._own_host = shard, device, own_host
        self._ordered = ordered and shard.size > 2  # two numbers have one sum
        timeout = _HANG_TIMEOUT if shard.stages == 1 else _STAGE_TIMEOUT
        self._all = self._join(store, shard.group_rank, shard.group_size, timeout)
        self._group = self._all
        if shard.stages > 1 and shard.size > 1:
            self._group = self._join(PrefixStore(f"{shard.stage}", store), shard.rank, shard.size, _HANG_TIMEOUT)

    def _join(self, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = max(timeout, _JOIN_TIMEOUT)
            return dist.ProcessGroupNCCL(store, rank, size, nccl)
        gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # not in torch's stubs
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_host)]
        gloo._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, gloo)

    def sum(self, partial: Tensor) -> Tensor:
        """Returns the sum of `partial` over the members of this pipeline stage. It may overwrite `partial`."""
        if not partial.numel() or self.shard.size == 1:
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
        """Returns logits. On the leader, the logits have the columns of all members of the first stage. On any other
        member, the logits have only this member's columns.
        """
        shard, rows = self.shard, own_RV.shape[0]
        if not rows:
            return own_RV.new_empty(0, arch.vocab_size)
        if shard.size == 1:
            return own_RV
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

    def send_on(self, x_TN: Tensor, delta_TN: Tensor) -> None:
        """Sends two tensors to the next pipeline stage: the residual stream, and the tensor that must still be added to
        it.
        """
        self._send(torch.stack((x_TN, delta_TN)), self.shard.group_rank + self.shard.size)

    def receive_from_before(self, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Receives two tensors from the previous pipeline stage: the residual stream, and the tensor that must still be
        added to it. They have the width and dtype of `like`.
        """
        both_2TN = like.new_empty(2, tokens, like.shape[-1])
        x_TN, delta_TN = self._receive(both_2TN, self.shard.group_rank - self.shard.size)
        return x_TN, delta_TN

    def send_back(self, hidden_RN: Tensor) -> None:
        """Sends the last stage's hidden states to the first stage, which has the head."""
        if len(hidden_RN):
            self._send(hidden_RN.contiguous(), self.shard.rank)

    def receive_back(self, rows: int, like: Tensor) -> Tensor:
        hidden_RN = like.new_empty(rows, like.shape[-1])
        last = self.shard.group_size - self.shard.size + self.shard.rank
        return self._receive(hidden_RN, last) if rows else hidden_RN

    def gather_bytes(self, own: Tensor, sizes: list[int]) -> list[Tensor]:
        """Sends this member's bytes to the leader. On the leader, returns the bytes of all members by rank. `sizes` has
        the number of bytes of each member. On other members, returns an empty list.
        """
        if self.shard.group_rank:
            self._send(own.to(self._device), 0)
            return []
        others = [self._receive(self._bytes(size), rank) for rank, size in enumerate(sizes[1:], 1)]
        return [own, *(each.cpu() for each in others)]

    def scatter_bytes(self, parts: list[Tensor], size: int) -> Tensor:
        """Returns this member's part of the bytes that the leader sends. On the leader, `parts` has the parts of all
        members by rank.
        """
        if self.shard.group_rank:
            return self._receive(self._bytes(size), 0).cpu()
        for rank, part in enumerate(parts[1:], 1):
            self._send(part.to(self._device), rank)
        return parts[0]

    def _bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _send(self, tensor: Tensor, rank: int) -> None:
        self._all.send([tensor], rank, 0).wait()

    def _receive(self, tensor: Tensor, rank: int) -> Tensor:
        self._all.recv([tensor], rank, 0).wait()
        return tensor
