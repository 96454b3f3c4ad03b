"""Offloads saved activations to host memory or to an unlinked file. Saved activations are the tensors that a layer
keeps for its backward pass.

A layer's weights are not offloaded, because FSDP gathers them again for the backward pass. Small tensors, and
tensors for which the pool has no space, also stay on the device.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
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


class StoredTensor(Protocol):
    """An offloaded tensor. When the object is deleted, its space in the pool is freed."""

    def read(self) -> Tensor: ...


class ActivationPool(ABC):
    """Holds offloaded tensors, up to a maximum number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.held_bytes, self.peak_bytes = max_bytes, 0, 0
        # Reentrant: autograd has its own threads, and the garbage collector may delete a tensor under the lock.
        self._lock = threading.RLock()

    def put(self, tensor: Tensor) -> StoredTensor | None:
        """Stores a copy of the tensor and returns the copy as a StoredTensor. Returns None if the pool is full."""
        count = tensor.numel() * tensor.element_size()
        return self._stored(tensor, count) if self.reserve(count) else None

    @abstractmethod
    def _stored(self, tensor: Tensor, count: int) -> StoredTensor: ...

    @abstractmethod
    def close(self) -> None:
        """Frees the pool's resources."""

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


class HostPool(ActivationPool):
    """A pool of pinned host memory. Copies run in order with the computation, because both use the same CUDA stream."""

    def _stored(self, tensor: Tensor, count: int) -> StoredTensor:
        return HostTensor(self, tensor, count)

    def close(self) -> None:
        """Does nothing, because buffers are freed with their tensors."""


class HostTensor:
    def __init__(self, pool: HostPool, tensor: Tensor, count: int) -> None:
        self._pool, self._count, self._device = pool, count, tensor.device
        self._buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._buffer.copy_(tensor, non_blocking=True)

    def read(self) -> Tensor:
        return self._buffer.to(self._device, non_blocking=True, copy=True)

    def __del__(self) -> None:
        self._pool.release(self._count)


class DiskPool(ActivationPool):
    """A pool in one file. The file is unlinked as soon as it is open, so that nothing is left on disk, however the
    process ends.
    """

    def __init__(self, max_bytes: int, folder: str | None) -> None:
        super().__init__(max_bytes)
        self.folder = folder or tempfile.gettempdir()
        os.makedirs(self.folder, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115  closed with the pool
        weakref.finalize(self, self._file.close)  # also if the trainer fails while it is built
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Free offsets by size: a model saves the same few shapes repeatedly."""

    def _stored(self, tensor: Tensor, count: int) -> StoredTensor:
        return DiskTensor(self, tensor, count)

    def close(self) -> None:
        self._file.close()

    def write(self, raw: memoryview) -> int:
        """Writes bytes to the file and returns their offset."""
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
            count = os.preadv(self._file.fileno(), [raw[done:]], start + done)
            if count == 0:
                raise StorageError(f"activations in {self.folder} are missing.", hint="Check that disk.")
            done += count

    def free(self, start: int, count: int) -> None:
        with self._lock:
            self._free[count].append(start)


class DiskTensor:
    def __init__(self, pool: DiskPool, tensor: Tensor, count: int) -> None:
        self._pool, self._count, self._start = pool, count, -1
        self._device, self._dtype = tensor.device, tensor.dtype
        # Dimensions by descending stride, so that a dense tensor keeps its strides.
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
    """Makes the layer store its saved tensors in the pool `into`. Saved tensors are those that the layer keeps for its
    backward pass. Tensors smaller than `min_bytes` stay on the device.
    """

    def offloaded(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            weights = {StorageWeakRef(local(weight).untyped_storage()) for weight in layer.parameters()}
            stored: dict[object, StoredTensor] = {}  # a tensor that several operations save is stored once

            def pack(tensor: Tensor) -> object:
                storage = StorageWeakRef(tensor.untyped_storage())  # holding it keeps the address from being reused
                key = (storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version)
                slot = stored.get(key)
                if slot is None and storage not in weights and tensor.numel() * tensor.element_size() >= min_bytes:
                    slot = into.put(tensor)
                if slot is None:
                    return tensor.detach()  # returning the tensor itself could create a reference cycle
                stored[key] = slot
                return slot

            with saved_tensors_hooks(pack, _unpack):
                return forward(*args, **kwargs)

        return wrapped

    wrap(layer, offloaded)


def _unpack(packed: object) -> Tensor:
    return packed if isinstance(packed, Tensor) else cast(StoredTensor, packed).read()


def _bytes(dense: Tensor) -> memoryview:
    return memoryview(dense.flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
