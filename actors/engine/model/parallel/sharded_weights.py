"""Reads one member's part of a model's weights. `shard.py` defines the parts.

A member reads only its own part of the files, even for quantized modules. GGUF files are an exception: a member
reads whole rows of them, even if the member needs only some of a row's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raytide.actors.engine.model.parallel.collectives import Collectives
from raytide.actors.engine.model.parallel.shard import ModelShard, ModuleCut, Range, behind_one_another, linear_cuts
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES
from raytide.actors.models.quantized.cutting import Block, SplitsGroupError
from raytide.actors.models.quantized.model_weights import WholeWeights
from raytide.actors.models.quantized.stacking import stacked
from raytide.core.errors import ConfigError
from raytide.kernels.core import LinearInput, QuantizedWeight
from raytide.kernels.ref import INPUT_GROUP

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Cut:
    """The ranges that one member reads of a tensor's dimension `dim`, which has `full` entries. Without ranges the
    member gets zeros of the local shape.
    """

    dim: int
    full: int
    ranges: tuple[Range, ...]


class ShardedWeights:
    """One member's weights. The names are those of the files, and the shapes are those of the member's own
    architecture.

    Inputs that are rounded to int8 are rounded in groups. A cut must not divide such a group, nor a quantization group
    of the weights.
    """

    def __init__(
        self, weights: WholeWeights, arch: Architecture, shard: ModelShard, rounded_as: LinearInput = "float"
    ) -> None:
        self._weights, self._names, self._shard = weights, NAMES[arch.names], shard
        self._unit = INPUT_GROUP if rounded_as == "int8" else 1
        full = f"{self._names.root}{self._names.embedding}.weight"
        self._root = self._names.root if full in weights else ""
        self._modules = dict(self._all_modules(arch))
        self._cuts = dict(self._all_cuts(arch))

    @property
    def quantization(self) -> str:
        return self._weights.quantization

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str, *shape: int) -> Tensor:
        """Returns this member's part of a tensor. The part has the shape `shape`. Raises DataError if the shape of the
        whole tensor is wrong.
        """
        cut = self._cuts.get(name)
        if cut is None:
            return self._weights.get(name, *shape)
        dim, whole = cut.dim, list(shape)
        whole[dim] = cut.full
        blocks = [
            self._weights.block(
                name, whole, tuple(slice(*each) if at == dim else slice(0, n) for at, n in enumerate(whole))
            )
            for each in cut.ranges
        ]
        if not blocks:
            return torch.zeros_like(self._weights.get(name, *whole))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)

    def stack(self, names: list[str], rows: list[int], *rest: int) -> Tensor:
        return torch.cat([self.get(name, size, *rest) for name, size in zip(names, rows, strict=True)])

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        """Returns this member's part of a quantized module. The part has `rows` rows and `columns` columns. Returns
        None if the module is not quantized. Raises ConfigError if the part would split a group of inputs.
        """
        cut = self._modules.get(module)
        if cut is None:
            return self._weights.quantized(module, rows, columns)
        if not cut.by_input:
            found = [
                self._weights.quantized_block(module, cut.full, columns, Block(r, (0, columns))) for r in cut.ranges
            ]
            parts = [each for each in found if each is not None]
            return stacked(parts) if parts else None
        ((first, end),) = cut.ranges
        try:
            own = self._weights.quantized_block(module, rows, cut.full, Block((0, rows), (first, end)))
        except SplitsGroupError:
            own, is_cut = None, True
        else:
            is_cut = own is not None and own.scales_NG.shape[1] == 1 and bool(first % self._unit or end % self._unit)
        if is_cut:  # of one group, or of several of which this member has one
            whole = self._weights.quantized(module, rows, cut.full)
            assert whole is not None
            if own is None or whole.scales_NG.shape[1] == 1:
                raise self._cuts_a_group(module, whole, cut)
        return own

    def check_all_read(self) -> None:
        self._weights.check_all_read()

    def _cuts_a_group(self, module: str, whole: QuantizedWeight, cut: ModuleCut) -> ConfigError:
        size, hint = self._shard.size, "Use pipeline_parallel, which cuts no layer"
        if whole.columns_K is not None and whole.scales_NG.shape[1] > 1:
            return ConfigError(
                f"{module} has groups of inputs that are not neighbours (desc_act), which tensor_parallel {size} "
                "would cut.",
                hint=f"{hint}, or quantize the model without desc_act.",
            )
        group = whole.group_size if whole.scales_NG.shape[1] > 1 else self._unit
        return ConfigError(
            f"{module} has {cut.full} inputs in groups of {group}, and tensor_parallel {size} gives each process "
            f"{cut.full / size:g} of them: a group would be cut.",
            hint=f"{hint}, or quantize the model in groups that divide {cut.full / size:g}.",
        )

    def _all_modules(self, arch: Architecture) -> Iterator[tuple[str, ModuleCut]]:
        vocabulary = ModuleCut(arch.vocab_size, (self._shard.part(arch.vocab_size),))
        yield f"{self._root}{self._names.embedding}", vocabulary
        yield self._names.head, vocabulary
        for index in range(arch.num_layers):
            for path, cut in linear_cuts(arch, index, self._shard).items():
                yield f"{self._root}{self._names.layer.format(index)}{path}", cut

    def _all_cuts(self, arch: Architecture) -> Iterator[tuple[str, _Cut]]:
        vocabulary = {f"{self._root}{self._names.embedding}", self._names.head}
        for module, cut in self._modules.items():
            is_transposed = self._names.transposed and module not in vocabulary
            yield f"{module}.weight", _Cut(int(cut.by_input != is_transposed), cut.full, cut.ranges)
            if not cut.by_input:
                yield f"{module}.bias", _Cut(0, cut.full, cut.ranges)
            elif self._shard.rank:  # a bias is added once
                yield f"{module}.bias", _Cut(0, arch.hidden_size, ())
        for index in range(arch.num_layers):
            if arch.layers[index].sparse:
                yield from self._expert_cuts(self._root + self._names.layer.format(index), arch)

    def _expert_cuts(self, at: str, arch: Architecture) -> Iterator[tuple[str, _Cut]]:
        assert arch.experts is not None
        size, names = arch.experts.ffn_size, self._names
        part = self._shard.part(size)
        yield at + names.fused_gate_up, _Cut(1, 2 * size, behind_one_another([(size, part)] * 2))
        yield at + names.fused_down, _Cut(2, size, (part,))
        for number in range(arch.experts.count):
            for path in names.expert_gate_up:
                yield f"{at}{path.format(number)}.weight", _Cut(0, size, (part,))
            yield f"{at}{names.expert_down.format(number)}.weight", _Cut(1, size, (part,))


class AdapterShard:
    """One member's part of LoRA adapters, which are cut in the same way as the modules. For a module that is cut by
    input, the products with A are summed over the members.

    `arch` is the architecture of the member's part. `layers` are the layers of the member's pipeline stage.
    """

    def __init__(self, arch: Architecture, group: Collectives) -> None:
        shard, names = group.shard, NAMES[arch.names]
        self.arch, self.layers, self._group = shard.architecture(arch), shard.layers(arch), group
        self._cuts = {
            names.layer.format(index) + path: cut
            for index in self.layers
            for path, cut in linear_cuts(arch, index, shard).items()
        }

    def cut(self, module: str, a_RN: Tensor, b_MR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns A and B, one of them cut for this member. If the module is cut by input, A keeps only the member's
        columns. Otherwise B keeps only the member's rows.
        """
        cut = self._cuts[module]
        if not cut.by_input:
            return a_RN, torch.cat([b_MR[first:end] for first, end in cut.ranges])
        ((first, end),) = cut.ranges
        return a_RN[:, first:end].contiguous(), b_MR

    def sum(self, partial_TR: Tensor) -> Tensor:
        """Returns the product of A with the whole input. The product is the sum of the partial products of all
        members.
        """
        return self._group.sum(partial_TR)
