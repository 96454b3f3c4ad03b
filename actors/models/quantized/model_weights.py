"""The weights of a model, whatever format its files have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from raytide.actors.models.loader import Weights
from raytide.actors.models.quantized.cutting import Block
from raytide.actors.models.quantized.gguf.gguf_file import GgufFile, is_gguf
from raytide.actors.models.quantized.gguf.gguf_weights import GgufWeights
from raytide.actors.models.quantized.quantized_directory import QuantizedDirectory, is_quantized
from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor


class ModelWeights(Protocol):
    """Tensors by the names of Hugging Face directories, in one dtype and on one device."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, *shape: int) -> Tensor:
        """Returns one tensor, dequantized if it is quantized. DataError if it is missing or has another shape."""

    def stack(self, names: list[str], rows: list[int], *rest: int) -> Tensor:
        """Returns tensors stacked along the first dimension."""

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        """Returns the quantized weight [rows, columns] of a linear module; None if it has none in integers."""

    def check_all_read(self) -> None:
        """Raises DataError for tensors that quantized modules have and nobody has read."""

    @property
    def quantization(self) -> str:
        """The method and formats of the quantized modules that were read; empty without any."""


class WholeWeights(ModelWeights, Protocol):
    """All of a model, of which parts can be read."""

    def block(self, name: str, shape: Sequence[int], where: tuple[slice, ...]) -> Tensor:
        """Returns a block of a tensor, with explicit ends; `shape` is the whole's."""

    def quantized_block(self, module: str, rows: int, columns: int, block: Block) -> QuantizedWeight | None:
        """Returns a part of what `quantized` would return; the rest is not read where the format permits. Raises
        SplitsGroupError where a part of the inputs cannot be cut."""


def open_weights(model: Path, dtype: torch.dtype, device: torch.device, *, maps: bool = True) -> WholeWeights:
    """Opens a model's files. Raises DataError if they are unreadable, ConfigError for a format that is not read.

    With `maps=False` nothing of a file stays in memory but the tensors that are returned.
    """
    if is_gguf(model):
        return GgufWeights(GgufFile(model), dtype, device)
    weights = Weights(model, dtype, device, maps=maps)
    return QuantizedDirectory(model, dtype, device, maps=maps) if is_quantized(weights) else weights
