"""The staging buffer: a copy of a rank's shards in one reusable block of memory. The copy is written to storage while
training continues.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytide.actors.trainer.checkpoint.train_state import TensorShard
from raytide.actors.trainer.optim.state_offload import DiskStorage, release

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """The place of a shard in the staging buffer's block of memory."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def end(self) -> int:
        return self.start + self.numel * self.dtype.itemsize


class StagingBuffer:
    def __init__(self) -> None:
        self.block = torch.zeros(0, dtype=torch.uint8)
        self.disk: DiskStorage | None = None
        """The file that has the block, for states that are larger than memory."""
        self.entries: list[BufferEntry] = []
        self.shards: list[TensorShard] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def size(self) -> int:
        """The number of bytes in use, from the start of the block."""
        return self.entries[-1].end if self.entries else 0

    @property
    def used(self) -> Tensor:
        return self.block[: self.size]

    def allocate(self, entries: list[BufferEntry], *, pinned: bool = False) -> None:
        """Makes room for these entries. A block that is too small is replaced by a new one. New memory is touched once,
        so that no copy waits for page faults.
        """
        if entries == self.entries:
            return
        self.entries = entries
        if self.size > len(self.block) and self.disk is not None:
            self.block = self.disk.empty((self.size,), torch.uint8)
        elif self.size > len(self.block):
            self.block = torch.zeros(self.size, dtype=torch.uint8, pin_memory=pinned)
        memory = self.block.numpy()
        self.shards = [TensorShard(e.name, e.shape, e.offsets, _view(memory, e)) for e in entries]

    def prepare(self, shards: Sequence[TensorShard]) -> None:
        self.allocate(_entries(shards), pinned=any(shard.local.is_cuda for shard in shards))

    def copy_from(self, shards: Sequence[TensorShard]) -> None:
        """Copies the shards' values into the buffer. The copy from a GPU is asynchronous: call `before_update` and
        `wait` afterwards.
        """
        self.prepare(shards)
        if not any(shard.local.is_cuda for shard in shards):
            self._copy(shards)
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(shards)
            self._copied = self._stream.record_event()

    def before_update(self) -> None:
        """Makes the GPU's next updates wait for the copy. The host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Waits until the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, shards: Sequence[TensorShard]) -> None:
        for copy, live in zip(self.shards, shards, strict=True):
            copy.local.copy_(live.local, non_blocking=True)
            if self._stream is not None and live.local.is_cuda:
                live.local.record_stream(self._stream)  # may be a temporary tensor of the optimizer
            release(live.local)
        release(self.block)


def _entries(shards: Sequence[TensorShard]) -> list[BufferEntry]:
    entries, at = [], 0
    for shard in shards:
        sizes = tuple(shard.local.shape)
        entry = BufferEntry(shard.name, shard.shape, shard.offsets, sizes, shard.local.dtype, at)
        entries.append(entry)
        at = -(-entry.end // _ALIGN) * _ALIGN
    return entries


def _view(memory: object, entry: BufferEntry) -> Tensor:
    """Returns a tensor whose storage is exactly as large as the tensor, because torch.save writes whole storages."""
    if entry.numel == 0:
        return torch.empty(entry.sizes, dtype=entry.dtype)
    flat = torch.frombuffer(memory, dtype=entry.dtype, count=entry.numel, offset=entry.start)
    return flat.view(entry.sizes)
