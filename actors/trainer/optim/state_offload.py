"""Stores optimizer state on the device, in host memory, or in a memory-mapped file.

Offloaded state is loaded for the update only, one parameter at a time.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from raytide.core.errors import StorageError
from raytide.core.specs.train import Place

State = dict[str, Tensor]


class StateStorage(Protocol):
    is_resident: bool
    """True if the state stays on the device, so that all parameters can be updated at once."""

    def store(self, state: State) -> State:
        """Store a parameter's initial state; returns the stored tensors."""

    def load(self, state: State, device: torch.device) -> State:
        """Returns the state on `device`."""

    def write_back(self, state: State, changed: Mapping[str, Tensor]) -> None:
        """Store changed values."""


class DeviceStorage:
    """Keeps the state on the device."""

    is_resident = True

    def store(self, state: State) -> State:
        return state

    def load(self, state: State, device: torch.device) -> State:
        return state

    def write_back(self, state: State, changed: Mapping[str, Tensor]) -> None:
        """The changes were made in place."""


class HostStorage:
    """Keeps the state in host memory, pinned if there is a GPU."""

    is_resident = False

    def store(self, state: State) -> State:
        return {key: self._take(value) for key, value in state.items()}

    def load(self, state: State, device: torch.device) -> State:
        return {key: value.to(device, non_blocking=True, copy=True) for key, value in state.items()}

    def write_back(self, state: State, changed: Mapping[str, Tensor]) -> None:
        for key, value in changed.items():
            state[key].copy_(value, non_blocking=True)

    def _take(self, value: Tensor) -> Tensor:
        home = torch.empty(value.shape, dtype=value.dtype, pin_memory=torch.cuda.is_available())
        return home.copy_(value)


class DiskStorage:
    """Keeps the state in one unlinked file, so that nothing is left however the process ends."""

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

    def _map(self, value: Tensor) -> Tensor:
        count = value.numel() * value.element_size()
        if count < mmap.ALLOCATIONGRANULARITY:  # smaller than a page
            return value
        start, self._size = (
            self._size,
            self._size + -(-count // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY,
        )
        try:
            os.posix_fallocate(self._file.fileno(), start, self._size - start)
        except OSError as error:
            size = f"{self._size >> 20} MiB of optimizer state"
            raise StorageError(
                f"cannot keep {size} in {self._folder}: {os.strerror(error.errno or errno.EIO)}.",
                hint="Point memory.scratch at a larger disk, or free space there.",
            ) from error
        mapped = mmap.mmap(self._file.fileno(), count, offset=start)
        tensor = torch.frombuffer(mapped, dtype=value.dtype).view(value.shape)
        return tensor.copy_(value)


def create_storage(place: Place, scratch: str | None = None) -> StateStorage:
    if place == "none":
        return DeviceStorage()
    return HostStorage() if place == "cpu" else DiskStorage(scratch)
