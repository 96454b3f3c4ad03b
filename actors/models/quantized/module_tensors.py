"""The tensors of one quantized module in a model directory. A tensor is found by its suffix, the part of its name that
follows the module's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from raytide.actors.models.loader import Weights
from raytide.core.errors import DataError

Tensor = torch.Tensor
Where = tuple[slice, ...] | None

_SCALE_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of one quantized module. Errors name the directory, the tensor, and what is wrong with the tensor."""

    weights: Weights
    module: str
    suffixes: frozenset[str]

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.suffixes

    @property
    def where(self) -> str:
        return f"{self.weights.folder}: {self.module}"

    def name(self, suffix: str) -> str:
        return f"{self.module}.{suffix}"

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.weights.shape(self.name(suffix))

    def dtype(self, suffix: str) -> str:
        return self.weights.dtype_of(self.name(suffix))

    def integers(self, suffix: str, *shape: int, dtype: str = "I32", where: Where = None) -> Tensor:
        """Returns a tensor of integers as stored. With `where`, returns only the block that these slices select. Each
        slice has an explicit start and stop.
        """
        return self._stored(suffix, (dtype,), shape, where)

    def scales(self, suffix: str, *shape: int, where: Where = None) -> Tensor:
        """Returns scales in float32: all scales, or the block that `where` selects. Raises DataError if a scale is not
        finite.
        """
        scales = self._stored(suffix, _SCALE_DTYPES, shape, where).float()
        if not bool(scales.isfinite().all()):
            raise DataError(
                f"{self.weights.folder}: {self.name(suffix)} has scales that are not finite.",
                hint="The quantization failed; repeat it.",
            )
        return scales

    def check_only(self, known: Iterable[str]) -> None:
        """Raises DataError if the module has a tensor whose suffix is not in `known`. `known` has the suffixes that the
        module's format uses.
        """
        if stray := sorted(self.suffixes.difference(known)):
            raise DataError(
                f"{self.where} has {', '.join(stray[:5])} beside its weight, which is of another format.",
                hint="The directory mixes two models; export it again.",
            )

    def _stored(self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...], where: Where) -> Tensor:
        if suffix not in self.suffixes:
            raise DataError(f"{self.where} has no {suffix}.", hint="Export or download the model again.")
        name = self.name(suffix)
        self.weights.check_shape(name, *shape)
        if (dtype := self.weights.dtype_of(name)) not in dtypes:
            raise DataError(
                f"{self.weights.folder}: {name} is stored as {dtype}, not {' or '.join(dtypes)}.",
                hint="The quantized format is another than its names say.",
            )
        is_whole = where is None or all(each == slice(0, size) for each, size in zip(where, shape, strict=True))
        return self.weights.stored(name) if where is None or is_whole else self.weights.stored_part(name, where)
