"""Fills a new layout's shards from snapshot copies in the memory of several ranks. The ranks exchange data in rounds.
In a round, a rank sends at most ROUND_BYTES to each of the other ranks, or a single part if that part alone is larger.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from raytide.actors.trainer.checkpoint.dcp import planner
from raytide.actors.trainer.checkpoint.peers.replication import SnapshotCopy
from raytide.actors.trainer.checkpoint.staging import StagingBuffer
from raytide.actors.trainer.checkpoint.train_state import TensorShard
from raytide.actors.trainer.distributed.process_group import ProcessGroup

ROUND_BYTES = 64 << 20
_ALIGN = 16

Key = tuple[str, tuple[int, ...]]
"""A stored shard: its name and offsets."""


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A rank's request for a part of a stored shard."""

    key: Key
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    shard: int
    """The index of the requesting rank's shard that the part fills."""
    into: tuple[int, ...]
    """The offsets of the part in that shard."""

    @property
    def size(self) -> int:
        return math.prod(self.lengths) * self.dtype.itemsize


class SnapshotReader:
    def __init__(self, group: ProcessGroup, copies: Sequence[SnapshotCopy], buffers: dict[int, StagingBuffer]) -> None:
        self._group = group
        self._holders: dict[Key, list[int]] = defaultdict(list)
        self._stored: dict[str, TensorStorageMetadata] = {}
        for copy in copies:
            for entry in copy.entries:
                key = (entry.name, entry.offsets)
                if key not in self._holders:
                    properties = TensorProperties(dtype=entry.dtype)
                    found = self._stored.setdefault(
                        entry.name, TensorStorageMetadata(properties, torch.Size(entry.shape), [])
                    )
                    found.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
                self._holders[key].append(copy.holder)
        self._local = {(p.name, p.offsets): p.local for image in buffers.values() for p in image.shards}

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Fills this rank's shards of the new layout. All ranks must call it together."""
        requests = self._group.gather(self._requests(shards))
        me, world = self._group.rank, self._group.world
        for request in requests[me][me]:
            _target(shards, request).copy_(self._read(request))
        incoming = {rank: _rounds(requests[me][rank]) for rank in range(world) if rank != me}
        outgoing = {rank: _rounds(requests[rank][me]) for rank in range(world) if rank != me}
        count = max((len(rounds) for rounds in [*incoming.values(), *outgoing.values()]), default=0)
        for index in range(count):
            self._round(shards, _nth_rounds(incoming, index), _nth_rounds(outgoing, index))

    def _requests(self, shards: Sequence[TensorShard]) -> list[list[ShardRequest]]:
        """Returns the parts to request from each rank: from this one where possible, else from the holders in turn."""
        requests: list[list[ShardRequest]] = [[] for _ in range(self._group.world)]
        for number, item in enumerate(planner.read_items(shards, dict(self._stored))):
            key = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            holders = self._holders[key]
            source = self._group.rank if self._group.rank in holders else holders[number % len(holders)]
            requests[source].append(
                ShardRequest(
                    key,
                    tuple(item.storage_offsets),
                    tuple(item.lengths),
                    self._stored[key[0]].properties.dtype,
                    int(item.dest_index.fqn),
                    tuple(item.dest_offsets),
                )
            )
        return requests

    def _round(
        self,
        shards: Sequence[TensorShard],
        incoming: dict[int, list[ShardRequest]],
        outgoing: dict[int, list[ShardRequest]],
    ) -> None:
        buffers = {rank: torch.empty(_span(requests), dtype=torch.uint8) for rank, requests in incoming.items()}
        packed = {rank: self._pack(requests) for rank, requests in outgoing.items()}
        works = [dist.irecv(buffer, rank, group=self._group.io) for rank, buffer in buffers.items()]
        works += [dist.isend(buffer, rank, group=self._group.io) for rank, buffer in packed.items()]
        for work in works:
            assert work is not None
            work.wait()
        for rank, requests in incoming.items():
            for request, at in zip(requests, _starts(requests), strict=True):
                flat = buffers[rank][at : at + request.size].view(request.dtype)
                _target(shards, request).copy_(flat.view(request.lengths))

    def _pack(self, requests: Sequence[ShardRequest]) -> Tensor:
        buffer = torch.empty(_span(requests), dtype=torch.uint8)
        for request, at in zip(requests, _starts(requests), strict=True):
            buffer[at : at + request.size].view(request.dtype).view(request.lengths).copy_(self._read(request))
        return buffer

    def _read(self, request: ShardRequest) -> Tensor:
        return planner.narrow(self._local[request.key], request.offsets, request.lengths)


def _target(shards: Sequence[TensorShard], request: ShardRequest) -> Tensor:
    return planner.narrow(shards[request.shard].local, request.into, request.lengths)


def _rounds(requests: Sequence[ShardRequest]) -> list[list[ShardRequest]]:
    rounds: list[list[ShardRequest]] = []
    size = ROUND_BYTES
    for request in requests:
        if size + request.size > ROUND_BYTES:
            rounds.append([])
            size = 0
        rounds[-1].append(request)
        size += request.size
    return rounds


def _nth_rounds(rounds: dict[int, list[list[ShardRequest]]], index: int) -> dict[int, list[ShardRequest]]:
    return {rank: parts[index] for rank, parts in rounds.items() if index < len(parts)}


def _starts(requests: Sequence[ShardRequest]) -> list[int]:
    starts, at = [], 0
    for request in requests:
        starts.append(at)
        at += -(-request.size // _ALIGN) * _ALIGN
    return starts


def _span(requests: Sequence[ShardRequest]) -> int:
    return sum(-(-request.size // _ALIGN) * _ALIGN for request in requests)
