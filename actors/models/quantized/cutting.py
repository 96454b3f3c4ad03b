"""Cuts a quantized weight among processes that share a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor
Range = tuple[int, int]


class SplitsGroupError(Exception):
    """Raised when a part of a weight's inputs cannot be cut out. Either the cut would split a quantization group, or
    the inputs of a group are not adjacent.
    """


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a weight: a range of its outputs and a range of its inputs."""

    outputs: Range
    inputs: Range

    @property
    def rows(self) -> slice:
        return slice(*self.outputs)

    @property
    def columns(self) -> slice:
        return slice(*self.inputs)

    @property
    def num_rows(self) -> int:
        return self.outputs[1] - self.outputs[0]

    def groups(self, columns: int, groups: int) -> slice:
        """Returns the range of quantization groups that the block's inputs cover. The weight's `columns` inputs are
        divided into `groups` groups. Raises SplitsGroupError if the block would split a group.
        """
        if groups == 1:
            return slice(0, 1)
        size, (first, end) = columns // groups, self.inputs
        if first % size or end % size:
            raise SplitsGroupError
        return slice(first // size, end // size)


def words_of(part: Range, bits: int) -> tuple[slice, slice]:
    """Returns the int32 words that hold a range of codes, and the range of the codes within these words."""
    per_word, (first, end) = 32 // bits, part
    start = first // per_word
    return slice(start, -(-end // per_word)), slice(first - start * per_word, end - start * per_word)


def cut_inputs(weight: QuantizedWeight, first: int, end: int) -> QuantizedWeight | None:
    """Returns the weight with only the inputs from `first` up to, but not including, `end`. Returns None if that would
    split a quantization group, or if the inputs of a group are not adjacent.
    """
    groups, size, codes_NK = weight.scales_NG.shape[1], weight.group_size, weight.codes_NK
    if groups > 1 and (weight.columns_K is not None or first % size or end % size):
        return None
    if weight.columns_K is not None:
        codes_NK = torch.empty_like(codes_NK).index_copy_(1, weight.columns_K.long(), codes_NK)

    def own(values: Tensor) -> Tensor:
        return values[:, first // size : end // size].contiguous() if groups > 1 else values

    offsets_NG = None if weight.offsets_NG is None else own(weight.offsets_NG)
    return QuantizedWeight(weight.bits, codes_NK[:, first:end].contiguous(), own(weight.scales_NG), offsets_NG)
