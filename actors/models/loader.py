"""Reads weights of a Hugging Face directory by name, from one or many memory-mapped safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raytide.actors.models.content import MOST_HEADER_BYTES, header_bytes
from raytide.actors.models.model_config import Fields, read_json
from raytide.core.errors import DataError
from raytide.core.io.private_paths import check_links, check_opened
from raytide.kernels.core import QuantizedWeight

_DTYPES = ("BF16", "F16", "F32", "F64")


class Weights:
    """Tensors by name, converted to a dtype and device."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dir, self._dtype, self._device = model_dir, dtype, device
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
        """Returns the shape without reading the tensor."""
        return tuple(self._slice(name).get_shape())

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """Returns one tensor. DataError if it is missing or has another shape than config.json implies."""
        self.check_shape(name, *shape)
        self._check_dtype(name)
        return self.stored(name).to(dtype=self._dtype)

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        """Returns the quantized weight [rows, columns] of a linear module; None if it is stored in floats."""
        return None

    def check_all_read(self) -> None:
        """Raises DataError for tensors that quantized modules have and nobody has read."""

    @property
    def quantization(self) -> str:
        """The formats of the quantized modules; empty without any."""
        return ""

    def check_shape(self, name: str, *shape: int) -> None:
        """Raises DataError for another shape, before anything of its size is allocated."""
        if (found := self.shape(name)) != shape:
            raise DataError(
                f"{self._dir}: weight {name} has shape {found}, config.json implies {shape}.",
                hint="The directory mixes two models; export it again.",
            )

    def dtype_of(self, name: str) -> str:
        """Returns the dtype as safetensors names it: BF16, I32, F8_E4M3."""
        return str(self._slice(name).get_dtype())

    def stored(self, name: str) -> torch.Tensor:
        """Returns one tensor in the dtype of its file."""
        try:
            tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise self._unreadable(name, error) from None
        return tensor.to(device=self._device)

    def part(self, name: str, where: tuple[slice, ...]) -> torch.Tensor:
        """Returns a block of a tensor, with explicit ends; the rest is not read."""
        if any(each.start >= each.stop for each in where):
            return torch.empty([each.stop - each.start for each in where], device=self._device, dtype=self._dtype)
        self._check_dtype(name)
        try:
            block: torch.Tensor = self._slice(name)[where]
        except SafetensorError as error:
            raise self._unreadable(name, error) from None
        return block.to(device=self._device, dtype=self._dtype)

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

    def _unreadable(self, name: str, error: SafetensorError) -> DataError:
        return DataError(f"{self._dir}: weight {name} cannot be read: {error}.", hint="The file is damaged.")

    def stack(self, names: list[str], rows: list[int], *rest: int) -> torch.Tensor:
        """Returns tensors stacked along the first dimension, so that one product computes all of them."""
        return torch.cat([self.get(name, size, *rest) for name, size in zip(names, rows, strict=True)])

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
                self._header_bytes_left -= header_bytes(self._dir / file, self._header_bytes_left)
                self._files[file] = safe_open(self._dir / file, framework="pt")
            except (OSError, RuntimeError, ValueError, SafetensorError) as error:
                raise DataError(
                    f"cannot read {self._dir / file}: {error}.", hint="The file is missing or damaged."
                ) from None
        return self._files[file]
