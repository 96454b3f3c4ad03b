"""Keep what a layer saves for its backward pass away from the device: in host memory, or in a file without a name.

Weights stay, since FSDP gathers them again, and so do small tensors and whatever finds the pool full.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from raytide.actors.trainer.distributed.local_shards import local
from raytide.actors.trainer.model.activation_checkpointing import wrap
from raytide.core.errors import StorageError
from raytide.core.specs.train import MemorySpec

__all__ = ["ActivationPool", "create_pool", "offload"]


class StoredTensor(Protocol):
    """A tensor that is away. Its place is free again once nothing refers to the slot."""

    def read(self) -> Tensor: ...


class ActivationPool(Protocol):
    held_bytes: int
    """Now; never above the pool's bound."""
    peak_bytes: int

    def put(self, tensor: Tensor) -> StoredTensor | None:
        """Take a copy of the tensor, or None when the pool is full."""

    def close(self) -> None:
        """Give the room back, whatever is still in it."""


class MemoryBudget:
    """What a pool holds, against its bound."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.held_bytes, self.peak_bytes = max_bytes, 0, 0
        # Backward passes run on autograd's own threads; the garbage collector may end a slot while its thread has this.
        self._lock = threading.RLock()

    def reserve(self, count: int) -> bool:
        with self._lock:
            if self.held_bytes + count > self.max_bytes:
                return False
            self.held_bytes += count
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            return True

    def release(self, count: int) -> None:
        with self._lock:
            self.held_bytes -= count


class HostPool(MemoryBudget):
    """Pinned buffers. Copies are ordered with the computation by the stream they share with it."""

    def put(self, tensor: Tensor) -> StoredTensor | None:
        count = tensor.numel() * tensor.element_size()
        return HostTensor(self, tensor, count) if self.reserve(count) else None

    def close(self) -> None:
        """Buffers are freed with their slots."""


class HostTensor:
    def __init__(self, pool: HostPool, tensor: Tensor, count: int) -> None:
        self._pool, self._count, self._device = pool, count, tensor.device
        self._buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._buffer.copy_(tensor, non_blocking=True)

    def read(self) -> Tensor:
        return self._buffer.to(self._device, non_blocking=True, copy=True)

    def __del__(self) -> None:
        self._pool.release(self._count)


class DiskPool(MemoryBudget):
    """One file that was unlinked as soon as it was open: nothing is left of it however the process ends."""

    def __init__(self, max_bytes: int, folder: str | None) -> None:
        super().__init__(max_bytes)
        self.folder = folder or tempfile.gettempdir()
        os.makedirs(self.folder, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115  closed with the pool
        weakref.finalize(self, self._file.close)  # a trainer that failed half built closes nothing
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Offsets of free places by their size: a model saves the same few shapes again and again."""

    def put(self, tensor: Tensor) -> StoredTensor | None:
        count = tensor.numel() * tensor.element_size()
        return DiskTensor(self, tensor, count) if self.reserve(count) else None

    def close(self) -> None:
        self._file.close()

    def write(self, raw: memoryview) -> int:
        """Where it is now."""
        with self._lock:
            if self._free[len(raw)]:
                start = self._free[len(raw)].pop()
            else:
                start, self._end = self._end, self._end + len(raw)
        done = 0
        while done < len(raw):
            try:
                done += os.pwrite(self._file.fileno(), raw[done:], start + done)
            except OSError as error:
                raise StorageError(
                    f"cannot write activations to {self.folder}: {error.strerror}.",
                    hint="Point memory.scratch at a larger disk, or lower memory.offload_max_bytes.",
                ) from error
        return start

    def read(self, start: int, raw: memoryview) -> None:
        done = 0
        while done < len(raw):
            got = os.preadv(self._file.fileno(), [raw[done:]], start + done)
            if got == 0:
                raise StorageError(f"activations in {self.folder} are gone.", hint="Check that disk.")
            done += got

    def free(self, start: int, count: int) -> None:
        with self._lock:
            self._free[count].append(start)


class DiskTensor:
    def __init__(self, pool: DiskPool, tensor: Tensor, count: int) -> None:
        self._pool, self._count, self._start = pool, count, -1
        self._device, self._dtype = tensor.device, tensor.dtype
        # Dimensions from the outermost in memory inwards: a dense tensor comes back with its own strides.
        strides = tensor.stride()
        self._order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
        dense = tensor.permute(self._order).contiguous()
        self._shape = dense.shape
        self._start = pool.write(_bytes(dense.cpu()))

    def read(self) -> Tensor:
        dense = torch.empty(self._shape, dtype=self._dtype)
        self._pool.read(self._start, _bytes(dense))
        back = [self._order.index(dim) for dim in range(len(self._order))]
        return dense.permute(back).to(self._device)

    def __del__(self) -> None:
        self._pool.release(self._count)
        if self._start >= 0:
            self._pool.free(self._start, self._count)


def create_pool(memory: MemorySpec) -> ActivationPool | None:
    if memory.activations == "none":
        return None
    if memory.activations == "cpu":
        return HostPool(memory.offload_max_bytes)
    return DiskPool(memory.offload_max_bytes, memory.scratch)


def offload(layer: nn.Module, into: ActivationPool, min_bytes: int) -> None:
    """Have what the layer saves wait in the pool."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            weights = {StorageWeakRef(local(weight).untyped_storage()) for weight in layer.parameters()}
            away: dict[object, StoredTensor] = {}  # what several operations save goes once

            def pack(tensor: Tensor) -> object:
                storage = StorageWeakRef(tensor.untyped_storage())  # while it is held, no other gets that address
                key = (storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
                slot = away.get(key)
                if slot is None and storage not in weights and tensor.numel() * tensor.element_size() >= min_bytes:
                    slot = into.put(tensor)
                if slot is None:
                    return tensor.detach()  # itself, it could hold the graph that holds it
                away[key] = slot
                return slot

            with saved_tensors_hooks(pack, _unpack):
                return forward(*args, **kwargs)

        return wrapped

    wrap(layer, around)


def _unpack(packed: object) -> Tensor:
    return packed if isinstance(packed, Tensor) else cast(StoredTensor, packed).read()


def _bytes(dense: Tensor) -> memoryview:
    return memoryview(dense.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
