"""Fill a new layout's pieces from images in several ranks' memory: who sends whom what, in rounds of bounded size."""

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
"""A stored piece: its name and offsets."""


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """A part of a stored piece that some rank wants."""

    key: Key
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    piece: int
    """Of the asker: which piece it fills."""
    into: tuple[int, ...]
    """Where in that piece."""

    @property
    def size(self) -> int:
        return math.prod(self.lengths) * self.dtype.itemsize


class SnapshotReader:
    def __init__(self, group: ProcessGroup, offered: Sequence[SnapshotCopy], images: dict[int, StagingBuffer]) -> None:
        self._group = group
        self._holders: dict[Key, list[int]] = defaultdict(list)
        self._stored: dict[str, TensorStorageMetadata] = {}
        for holding in offered:
            for entry in holding.entries:
                key = (entry.name, entry.offsets)
                if key not in self._holders:
                    properties = TensorProperties(dtype=entry.dtype)
                    found = self._stored.setdefault(
                        entry.name, TensorStorageMetadata(properties, torch.Size(entry.shape), [])
                    )
                    found.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
                self._holders[key].append(holding.holder)
        self._mine = {(p.name, p.offsets): p.local for image in images.values() for p in image.shards}

    def fill(self, pieces: Sequence[TensorShard]) -> None:
        """All ranks together, each with the pieces of its own place in the new layout."""
        asked = self._group.gather(self._requests(pieces))
        me, world = self._group.rank, self._group.world
        for wish in asked[me][me]:
            _target(pieces, wish).copy_(self._part(wish))
        incoming = {rank: _rounds(asked[me][rank]) for rank in range(world) if rank != me}
        outgoing = {rank: _rounds(asked[rank][me]) for rank in range(world) if rank != me}
        count = max((len(rounds) for rounds in [*incoming.values(), *outgoing.values()]), default=0)
        for index in range(count):
            self._round(pieces, _at(incoming, index), _at(outgoing, index))

    def _requests(self, pieces: Sequence[TensorShard]) -> list[list[ShardRequest]]:
        """By the rank that is asked: this one where it can, else those that have it in turn."""
        wishes: list[list[ShardRequest]] = [[] for _ in range(self._group.world)]
        for turn, item in enumerate(planner.read_items(pieces, dict(self._stored))):
            key = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
            holders = self._holders[key]
            asked = self._group.rank if self._group.rank in holders else holders[turn % len(holders)]
            wishes[asked].append(
                ShardRequest(
                    key,
                    tuple(item.storage_offsets),
                    tuple(item.lengths),
                    self._stored[key[0]].properties.dtype,
                    int(item.dest_index.fqn),
                    tuple(item.dest_offsets),
                )
            )
        return wishes

    def _round(
        self,
        pieces: Sequence[TensorShard],
        incoming: dict[int, list[ShardRequest]],
        outgoing: dict[int, list[ShardRequest]],
    ) -> None:
        buffers = {rank: torch.empty(_span(wishes), dtype=torch.uint8) for rank, wishes in incoming.items()}
        packed = {rank: self._pack(wishes) for rank, wishes in outgoing.items()}
        works = [dist.irecv(buffer, rank, group=self._group.io) for rank, buffer in buffers.items()]
        works += [dist.isend(buffer, rank, group=self._group.io) for rank, buffer in packed.items()]
        for work in works:
            assert work is not None
            work.wait()
        for rank, wishes in incoming.items():
            for wish, at in zip(wishes, _starts(wishes), strict=True):
                flat = buffers[rank][at : at + wish.size].view(wish.dtype)
                _target(pieces, wish).copy_(flat.view(wish.lengths))

    def _pack(self, wishes: Sequence[ShardRequest]) -> Tensor:
        buffer = torch.empty(_span(wishes), dtype=torch.uint8)
        for wish, at in zip(wishes, _starts(wishes), strict=True):
            buffer[at : at + wish.size].view(wish.dtype).view(wish.lengths).copy_(self._part(wish))
        return buffer

    def _part(self, wish: ShardRequest) -> Tensor:
        return planner.narrow(self._mine[wish.key], wish.offsets, wish.lengths)


def _target(pieces: Sequence[TensorShard], wish: ShardRequest) -> Tensor:
    return planner.narrow(pieces[wish.piece].local, wish.into, wish.lengths)


def _rounds(wishes: Sequence[ShardRequest]) -> list[list[ShardRequest]]:
    rounds: list[list[ShardRequest]] = []
    size = ROUND_BYTES
    for wish in wishes:
        if size + wish.size > ROUND_BYTES:
            rounds.append([])
            size = 0
        rounds[-1].append(wish)
        size += wish.size
    return rounds


def _at(rounds: dict[int, list[list[ShardRequest]]], index: int) -> dict[int, list[ShardRequest]]:
    return {rank: parts[index] for rank, parts in rounds.items() if index < len(parts)}


def _starts(wishes: Sequence[ShardRequest]) -> list[int]:
    starts, at = [], 0
    for wish in wishes:
        starts.append(at)
        at += -(-wish.size // _ALIGN) * _ALIGN
    return starts


def _span(wishes: Sequence[ShardRequest]) -> int:
    return sum(-(-wish.size // _ALIGN) * _ALIGN for wish in wishes)
