"""Reads the weights of a Hugging Face directory by name, from safetensors files. The files are either memory-mapped or
copied into memory.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raytide.actors.models.content import MOST_HEADER_BYTES, header_bytes
from raytide.actors.models.model_config import Fields, read_json
from raytide.actors.models.quantized.cutting import Block
from raytide.core.errors import DataError
from raytide.core.io.private_paths import check_links, check_opened, safe_opener
from raytide.kernels.core import QuantizedWeight
from raytide.kernels.device import in_huge_pages

_DTYPES = ("BF16", "F16", "F32", "F64")
_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
_MOST_READ_BYTES = 1 << 30  # Linux reads no more than 2 GiB in one call


class Weights:
    """The tensors of a model directory by name, converted to a dtype and device.

    If `maps` is False, files are read instead of memory-mapped. Only the tensors that the caller holds then stay in
    memory.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device, *, maps: bool = True) -> None:
        self._dir, self._dtype, self._device, self._maps = model_dir, dtype, device, maps
        self._files: dict[str, Any] = {}
        self._header_bytes_left = MOST_HEADER_BYTES
        check_links(str(model_dir))
        self._file_of = self._index()

    @property
    def folder(self) -> Path:
        return self._dir

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading the tensor."""
        return tuple(self._slice(name).get_shape())

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """Returns one tensor. Raises DataError if the tensor is missing, or if its shape is not the one that
        config.json implies.
        """
        self.check_shape(name, *shape)
        self._check_dtype(name)
        return self._own(self.stored(name))

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        """Returns None, because the weights here are plain floats. A subclass returns the quantized weight [rows,
        columns] of a module.
        """
        return None

    def quantized_block(self, module: str, rows: int, columns: int, block: Block) -> QuantizedWeight | None:
        """Returns None, because the weights here are plain floats."""
        return None

    def check_all_read(self) -> None:
        """Raises DataError if tensors of quantized modules were not read. Does nothing here, since plain weights have
        no such tensors.
        """

    @property
    def quantization(self) -> str:
        """The formats of the quantized modules. Empty if no module is quantized."""
        return ""

    def check_shape(self, name: str, *shape: int) -> None:
        """Raises DataError if a tensor does not have this shape. Call it before memory for the tensor is allocated."""
        if (found := self.shape(name)) != shape:
            raise DataError(
                f"{self._dir}: weight {name} has shape {found}, config.json implies {shape}.",
                hint="The directory mixes two models; export it again.",
            )

    def dtype_of(self, name: str) -> str:
        """Returns a tensor's dtype as safetensors names it: BF16, I32, F8_E4M3."""
        return str(self._slice(name).get_dtype())

    def stored(self, name: str) -> torch.Tensor:
        """Returns one tensor in the dtype of its file."""
        try:
            tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._unreadable(name, error) from None
        return tensor.to(device=self._device)

    def part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """Returns the block `where` of a tensor, without reading the rest. The slices in `where` have explicit starts
        and ends.
        """
        if any(each.start >= each.stop for each in where):
            return torch.empty([each.stop - each.start for each in where], device=self._device, dtype=self._dtype)
        self._check_dtype(name)
        return self._own(self.stored_part(name, where))

    def stored_part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """Returns the block `where` of a tensor in the dtype of its file, without reading the rest of the tensor. The
        slices in `where` must have explicit starts and ends, and must not be empty.
        """
        try:
            block: torch.Tensor = self._slice(name)[where]
        except (SafetensorError, OSError) as error:
            raise self._unreadable(name, error) from None
        return block.to(device=self._device)

    def block(self, name: str, shape: Sequence[int], where: tuple[slice, ...]) -> torch.Tensor:
        """Returns the block `where` of a tensor whose whole shape is `shape`, without reading the rest. The slices in
        `where` have explicit starts and ends.
        """
        self.check_shape(name, *shape)
        return self.part(name, where)

    def _own(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns a stored tensor in this object's dtype, in memory of its own. A mapped tensor would change with its
        file, and end the process if the file became shorter.
        """
        tensor = stored.to(dtype=self._dtype)
        return tensor.clone() if tensor is stored and self._maps and tensor.device.type == "cpu" else tensor

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise DataError(f"{self._dir} has no weight {name}.", hint="Export or download the model again.")
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise self._unreadable(name, error) from None

    def _check_dtype(self, name: str) -> None:
        if (dtype := self.dtype_of(name)) not in _DTYPES:
            raise DataError(
                f"{self._dir}: weight {name} is stored as {dtype}, without what quantized weights have beside them.",
                hint=f"Supported for plain weights: {', '.join(_DTYPES)}.",
            )

    def _unreadable(self, name: str, error: Exception) -> DataError:
        return DataError(f"{self._dir}: weight {name} cannot be read: {error}.", hint="The file is damaged.")

    def stack(self, names: list[str], rows: list[int], *rest: int) -> torch.Tensor:
        """Returns the named tensors stacked along the first dimension, so that a single matrix product suffices for all
        of them.
        """
        if self._maps and len(names) == 1:
            return self.get(names[0], rows[0], *rest)
        if self._maps:
            return torch.cat([self.get(name, size, *rest) for name, size in zip(names, rows, strict=True)])
        stacked, first = _empty((sum(rows), *rest), self._dtype).to(self._device), 0
        for name, size in zip(names, rows, strict=True):
            self._read_into(stacked[first : first + size], name)
            first += size
        return stacked

    def _read_into(self, target: torch.Tensor, name: str) -> None:
        self.check_shape(name, *target.shape)
        if _TORCH_DTYPES.get(self.dtype_of(name)) != target.dtype or target.device.type != "cpu":
            target.copy_(self.get(name, *target.shape))
            return
        try:
            self._open(self._file_of[name]).read_into(target, name)
        except (SafetensorError, OSError) as error:
            raise self._unreadable(name, error) from None

    def _index(self) -> dict[str, str]:
        index = self._dir / "model.safetensors.index.json"
        if index.exists():
            return {
                name: str(file)
                for name, file in Fields(read_json(index), str(index)).section("weight_map").body.items()
            }
        files = sorted(path.name for path in self._dir.glob("*.safetensors"))
        if not files:
            raise DataError(
                f"{self._dir} holds no *.safetensors file.", hint="Point at a Hugging Face model directory."
            )
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (not a dict)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                check_opened(str(self._dir / file))  # the index may name a file anywhere
                header = header_bytes(self._dir / file, self._header_bytes_left)
                self._header_bytes_left -= header
                path = self._dir / file
                self._files[file] = safe_open(path, framework="pt") if self._maps else TensorFile(path, header)
            except (OSError, RuntimeError, ValueError, SafetensorError) as error:
                raise DataError(
                    f"cannot read {self._dir / file}: {error}.", hint="The file is missing or damaged."
                ) from None
        return self._files[file]


class TensorFile:
    """A safetensors file whose tensors are read instead of memory-mapped. It has those methods of `safe_open` that
    `Weights` needs.
    """

    def __init__(self, path: Path, header_size: int) -> None:
        with safe_open(path, framework="np"):
            pass  # it has checked the header against the file
        self._file = safe_opener(str(path), os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._start = 8 + header_size
        self._tensors: dict[str, dict[str, Any]] = json.loads(os.pread(self._file, header_size, 8))
        self._tensors.pop("__metadata__", None)
        self._state = self._present_state()

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> TensorSlice:
        if name not in self._tensors:
            raise SafetensorError(f"file does not contain tensor {name}")
        return TensorSlice(self, name, self._tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        header = self.get_slice(name).header
        if (dtype := _TORCH_DTYPES.get(header["dtype"])) is None:
            raise SafetensorError(f"its dtype {header['dtype']} is not supported")
        tensor = _empty(header["shape"], dtype)
        self.read_into(tensor, name)
        return tensor

    def get_rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Returns the rows of a tensor from row `first` up to, but not including, row `end`."""
        header = self.get_slice(name).header
        if (dtype := _TORCH_DTYPES.get(header["dtype"])) is None:
            raise SafetensorError(f"its dtype {header['dtype']} is not supported")
        rows = _empty((end - first, *header["shape"][1:]), dtype)
        self.read_into(rows, name, skipped=first * (rows.nbytes // max(1, end - first)))
        return rows

    def read_into(self, target: torch.Tensor, name: str, skipped: int = 0) -> None:
        """Reads a tensor's content into `target`, a contiguous tensor of the same dtype. Skips the first `skipped`
        bytes of the content.
        """
        if target.numel():
            start = self.get_slice(name).header["data_offsets"][0] + skipped
            self._read(memoryview(target.view(-1).view(torch.uint8).numpy().data), self._start + start)

    def _read(self, target: memoryview, start: int) -> None:
        if self._present_state() != self._state:
            raise SafetensorError("the file has been changed since the model was loaded")
        at = 0
        while at < len(target):
            count = os.preadv(self._file, [target[at : at + _MOST_READ_BYTES]], start + at)
            if not count:
                raise SafetensorError("the file has become shorter")
            at += count

    def _present_state(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A tensor of a `TensorFile`, not read yet. Indexing the slice reads a block of the tensor."""

    file: TensorFile
    name: str
    header: dict[str, Any]

    def get_shape(self) -> list[int]:
        return list(self.header["shape"])

    def get_dtype(self) -> str:
        return str(self.header["dtype"])

    def __getitem__(self, where: tuple[slice, ...]) -> torch.Tensor:
        rows = self.file.get_rows(self.name, where[0].start, where[0].stop)
        return rows[(slice(None), *where[1:])].clone()


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns an uninitialized tensor, in huge pages where possible: filling these is three times as fast."""
    return in_huge_pages(torch.empty(shape, dtype=dtype))
