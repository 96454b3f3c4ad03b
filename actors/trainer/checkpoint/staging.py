"""A copy of a rank's pieces in one block of memory, which the next copy reuses: what is saved beside the training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from raytide.actors.trainer.checkpoint.train_state import TensorShard

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """Where a piece lies in a block."""

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
        self.entries: list[BufferEntry] = []
        self.shards: list[TensorShard] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def size(self) -> int:
        """Bytes in use, at the front of the block."""
        return self.entries[-1].end if self.entries else 0

    @property
    def used(self) -> Tensor:
        return self.block[: self.size]

    def allocate(self, entries: list[BufferEntry], *, pinned: bool = False) -> None:
        """Make room. Memory is touched here once, so that no copy waits for the kernel to find pages."""
        if entries == self.entries:
            return
        self.entries = entries
        if self.size > len(self.block):
            self.block = torch.zeros(self.size, dtype=torch.uint8, pin_memory=pinned)
        memory = self.block.numpy()
        self.shards = [TensorShard(e.name, e.shape, e.offsets, _view(memory, e)) for e in entries]

    def prepare(self, pieces: Sequence[TensorShard]) -> None:
        self.allocate(_entries(pieces), pinned=any(piece.local.is_cuda for piece in pieces))

    def copy_from(self, pieces: Sequence[TensorShard]) -> None:
        """Take the pieces' values. From a GPU this only starts: see `before_update` and `wait`."""
        self.prepare(pieces)
        if not any(piece.local.is_cuda for piece in pieces):
            self._copy(pieces)
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(pieces)
            self._copied = self._stream.record_event()

    def before_update(self) -> None:
        """Let the GPU change no weight before it is copied; the host does not wait."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Until the copy is whole."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, pieces: Sequence[TensorShard]) -> None:
        for mine, live in zip(self.shards, pieces, strict=True):
            mine.local.copy_(live.local, non_blocking=True)
            if self._stream is not None and live.local.is_cuda:
                live.local.record_stream(self._stream)  # it may be a temporary of the optimizer's


def _entries(pieces: Sequence[TensorShard]) -> list[BufferEntry]:
    entries, at = [], 0
    for piece in pieces:
        sizes = tuple(piece.local.shape)
        entry = BufferEntry(piece.name, piece.shape, piece.offsets, sizes, piece.local.dtype, at)
        entries.append(entry)
        at = -(-entry.end // _ALIGN) * _ALIGN
    return entries


def _view(memory: object, entry: BufferEntry) -> Tensor:
    """With a storage of exactly its size: torch.save writes all of a storage."""
    if entry.numel == 0:
        return torch.empty(entry.sizes, dtype=entry.dtype)
    flat = torch.frombuffer(memory, dtype=entry.dtype, count=entry.numel, offset=entry.start)
    return flat.view(entry.sizes)
