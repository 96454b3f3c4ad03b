"""The interface to a model's weights. It is the same for all file formats."""

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
    """The weights of a model in one dtype and on one device. Tensors are named as in Hugging Face directories."""

    def __contains__(self, name: str) -> bool: ...

    def get(self, name: str, *shape: int) -> Tensor:
        """Returns one tensor, dequantized if necessary. Raises DataError if it is missing or has another shape."""

    def stack(self, names: list[str], rows: list[int], *rest: int) -> Tensor:
        """Returns tensors stacked along the first dimension."""

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        """Returns the quantized weight [rows, columns] of a linear module, or None if the weight is not stored as
        integers.
        """

    def check_all_read(self) -> None:
        """Raises DataError if tensors of quantized modules were not read. For a GGUF file, any tensor that was not read
        is an error.
        """

    @property
    def quantization(self) -> str:
        """The method and formats of the quantized modules that were read. Empty if none was quantized."""


class WholeWeights(ModelWeights, Protocol):
    """The weights of a whole model. Parts of a tensor can be read as blocks."""

    def block(self, name: str, shape: Sequence[int], where: tuple[slice, ...]) -> Tensor:
        """Returns the block that the slices `where` select from a tensor. `shape` is the shape of the whole tensor.
        Each slice has an explicit start and stop.
        """

    def quantized_block(self, module: str, rows: int, columns: int, block: Block) -> QuantizedWeight | None:
        """Returns a block of a module's quantized weight [rows, columns], or None if the weight is not stored as
        integers. Reads only the block if the format permits. Raises SplitsGroupError if the block's columns begin or
        end inside a quantization group.
        """


def open_weights(model: Path, dtype: torch.dtype, device: torch.device, *, maps: bool = True) -> WholeWeights:
    """Opens a model's files. Raises DataError if the files are unreadable. Raises ConfigError if the format is not
    supported.

    If `maps` is False, files are not memory-mapped, and only the returned tensors stay in memory.
    """
    if is_gguf(model):
        return GgufWeights(GgufFile(model), dtype, device)
    weights = Weights(model, dtype, device, maps=maps)
    return QuantizedDirectory(model, dtype, device, maps=maps) if is_quantized(weights) else weights
