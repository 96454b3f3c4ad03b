"""Stores the optimizer's state on the device, in host memory, or in a memory-mapped file.

Offloaded state is loaded only for the update, one parameter at a time. After the update, the pages of a file are
dropped from memory.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raytide.core.errors import StorageError
from raytide.core.specs.train import Place

State = dict[str, Tensor]


class StateStorage:
    """Keeps the optimizer's state on the device. Derived classes keep it in other places."""

    is_resident = True
    """True if the state stays on the device, so that all parameters can be updated at once."""

    def store(self, state: State) -> State:
        """Stores a parameter's initial state, and returns the stored tensors."""
        return state

    def load(self, state: State, device: torch.device) -> State:
        """Returns a parameter's state on `device`."""
        return state

    def write_back(self, state: State, changed: Mapping[str, Tensor]) -> None:
        """Stores the values that an update has changed. For state on the device it does nothing, because the update
        changes that state in place.
        """

    def wait(self) -> None:
        """Waits until the values of the last update are stored."""


class HostStorage(StateStorage):
    """Keeps the optimizer's state in host memory. The memory is pinned if there is a GPU."""

    is_resident = False

    def store(self, state: State) -> State:
        return {key: self._take(value) for key, value in state.items()}

    def load(self, state: State, device: torch.device) -> State:
        return {key: value.to(device, non_blocking=True, copy=True) for key, value in state.items()}

    def write_back(self, state: State, changed: Mapping[str, Tensor]) -> None:
        for key, value in changed.items():
            state[key].copy_(value, non_blocking=True)

    def wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    def _take(self, value: Tensor) -> Tensor:
        home = torch.empty(value.shape, dtype=value.dtype, pin_memory=torch.cuda.is_available())
        return home.copy_(value)


class DiskStorage(StateStorage):
    """Keeps the optimizer's state in one file. The file is unlinked while open, so that nothing is left on disk,
    however the process ends.
    """

    is_resident = False

    def __init__(self, folder: str | None) -> None:
        self._folder = folder or tempfile.gettempdir()
        os.makedirs(self._folder, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  closed with the states
        weakref.finalize(self, self._file.close)
        self._size = 0

    def store(self, state: State) -> State:
        return {key: self._map(value) for key, value in state.items()}

    def load(self, state: State, device: torch.device) -> State:
        return {key: value.to(device, copy=True) for key, value in state.items()}

    def write_back(self, state: State, changed: Mapping[str, Tensor]) -> None:
        for key, value in changed.items():
            state[key].copy_(value)
            release(state[key])

    def _map(self, value: Tensor) -> Tensor:
        mapped = self.empty(value.shape, value.dtype).copy_(value)
        release(mapped)
        return mapped

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns an uninitialized tensor in the file. A tensor that is smaller than a page is in memory instead."""
        count = math.prod(shape) * dtype.itemsize
        if count < mmap.ALLOCATIONGRANULARITY:
            return torch.empty(tuple(shape), dtype=dtype)
        start, self._size = (
            self._size,
            self._size + -(-count // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY,
        )
        try:
            os.posix_fallocate(self._file.fileno(), start, self._size - start)
        except OSError as error:
            why = os.strerror(error.errno or errno.EIO)
            raise StorageError(
                f"cannot keep {self._size >> 20} MiB of training state in {self._folder}: {why}.",
                hint="Point memory.scratch at a larger disk, or free space there.",
            ) from error
        mapped = mmap.mmap(self._file.fileno(), count, offset=start)
        tensor = torch.frombuffer(mapped, dtype=dtype).view(tuple(shape))
        _MAPS[tensor.data_ptr()] = mapped
        return tensor


_MAPS: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""The mappings of tensors in files, by address."""


def is_mapped(tensor: Tensor) -> bool:
    """Returns whether the tensor is mapped from a file."""
    return tensor.data_ptr() in _MAPS


def read_ahead(tensor: Tensor) -> None:
    """Asks the kernel to read a file-mapped tensor into memory soon. Does nothing for other tensors."""
    if (mapped := _MAPS.get(tensor.data_ptr())) is not None:
        mapped.madvise(mmap.MADV_WILLNEED)


def release(tensor: Tensor) -> None:
    """Drops a file-mapped tensor from this process's memory. The file keeps the values. Does nothing for other
    tensors.
    """
    if (mapped := _MAPS.get(tensor.data_ptr())) is not None:
        mapped.madvise(mmap.MADV_DONTNEED)


def create_storage(place: Place, scratch: str | None = None) -> StateStorage:
    if place == "none":
        return StateStorage()
    return HostStorage() if place == "cpu" else DiskStorage(scratch)
