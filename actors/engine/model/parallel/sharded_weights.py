"""One member's weights, read by slice from safetensors files.

Projections into heads and feed-forward columns are cut by output, those out of them by input (Shoeybi et al. 2019), so
that a layer's two sums are all that members exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from raytide.actors.engine.model.parallel.shard import ModelShard, Range
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.loader import Weights
from raytide.actors.models.naming import NAMES, projections
from raytide.kernels.core import QuantizedWeight

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Cut:
    """The ranges of a tensor's dimension `dim`, of `full` entries, that one member reads; none: zeros of the local
    shape."""

    dim: int
    full: int
    ranges: tuple[Range, ...]


class ShardedWeights:
    """One member's weights, by the names and with the shapes of its own architecture."""

    quantization = ""

    def __init__(self, weights: Weights, arch: Architecture, shard: ModelShard) -> None:
        self._weights, self._names = weights, NAMES[arch.names]
        full = f"{self._names.root}{self._names.embedding}.weight"
        self._root = self._names.root if full in weights else ""
        self._cuts = dict(self._all_cuts(arch, shard))

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def get(self, name: str, *shape: int) -> Tensor:
        """Returns this member's part, whose shape is given. DataError if the whole has another than implied."""
        cut = self._cuts.get(name)
        if cut is None:
            return self._weights.get(name, *shape)
        dim, whole = cut.dim, list(shape)
        whole[dim] = cut.full
        self._weights.check_shape(name, *whole)
        blocks = [
            self._weights.part(name, tuple(slice(*each) if at == dim else slice(0, n) for at, n in enumerate(whole)))
            for each in cut.ranges
        ]
        if not blocks:
            return torch.zeros_like(self._weights.get(name, *whole))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)

    def stack(self, names: list[str], rows: list[int], *rest: int) -> Tensor:
        return torch.cat([self.get(name, size, *rest) for name, size in zip(names, rows, strict=True)])

    def quantized(self, module: str, rows: int, columns: int) -> QuantizedWeight | None:
        return None

    def check_all_read(self) -> None:
        """Plain weights may have tensors that nothing reads."""

    def _all_cuts(self, arch: Architecture, shard: ModelShard) -> Iterator[tuple[str, _Cut]]:
        vocabulary = _Cut(0, arch.vocab_size, (shard.part(arch.vocab_size),))
        yield f"{self._root}{self._names.embedding}.weight", vocabulary
        yield f"{self._names.head}.weight", vocabulary
        for index in range(arch.num_layers):
            at = self._root + self._names.layer.format(index)
            yield from self._linear_cuts(at, arch, index, shard)
            if arch.layers[index].sparse:
                yield from self._expert_cuts(at, arch, shard)

    def _linear_cuts(self, at: str, arch: Architecture, index: int, shard: ModelShard) -> Iterator[tuple[str, _Cut]]:
        dim = arch.head_dim
        first, end = (dim * head for head in shard.part(arch.num_heads))
        kv = tuple(dim * head for head in shard.kv_heads(arch))
        ffn = shard.part(arch.ffn_size)
        q_size, kv_size = arch.num_heads * dim, arch.num_kv_heads * dim
        outputs = {
            "qkv": [(q_size, (first, end)), (kv_size, (kv[0], kv[1])), (kv_size, (kv[0], kv[1]))],
            "gate_up": [(arch.ffn_size, ffn)] * (2 if arch.gated_ffn else 1),
        }
        inputs = {"attention_out": (first, end), "down": ffn}
        out_dim = 1 if self._names.transposed else 0
        for kind, by in projections(arch, index).items():
            if kind in inputs:
                (path,) = by.paths
                yield f"{at}{path}.weight", _Cut(1 - out_dim, by.columns, (inputs[kind],))
                if shard.rank:  # a bias is added once
                    yield f"{at}{path}.bias", _Cut(0, by.rows[0], ())
                continue
            parts = outputs[kind]
            cuts: list[tuple[str, int, tuple[Range, ...]]]
            if len(by.paths) == len(parts):
                cuts = [(path, size, (part,)) for path, (size, part) in zip(by.paths, parts, strict=True)]
            else:
                cuts = [(by.paths[0], sum(size for size, _ in parts), _behind_one_another(parts))]
            for path, size, ranges in cuts:
                yield f"{at}{path}.weight", _Cut(out_dim, size, ranges)
                yield f"{at}{path}.bias", _Cut(0, size, ranges)

    def _expert_cuts(self, at: str, arch: Architecture, shard: ModelShard) -> Iterator[tuple[str, _Cut]]:
        assert arch.experts is not None
        size, names = arch.experts.ffn_size, self._names
        part = shard.part(size)
        yield at + names.fused_gate_up, _Cut(1, 2 * size, _behind_one_another([(size, part)] * 2))
        yield at + names.fused_down, _Cut(2, size, (part,))
        for number in range(arch.experts.count):
            for path in names.expert_gate_up:
                yield f"{at}{path.format(number)}.weight", _Cut(0, size, (part,))
            yield f"{at}{names.expert_down.format(number)}.weight", _Cut(1, size, (part,))


def _behind_one_another(parts: list[tuple[int, Range]]) -> tuple[Range, ...]:
    """Returns the ranges of parts that the file stores as one tensor; each part has its size and range."""
    ranges, start = list[Range](), 0
    for size, (first, end) in parts:
        ranges.append((start + first, start + end))
        start += size
    return tuple(ranges)
