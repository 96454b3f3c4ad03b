"""One member's part of a model: its layers, and its share of the heads, feed-forward columns and vocabulary rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import projections
from raytide.core.errors import ConfigError

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ModuleCut:
    """One member's part of a linear module. If `by_input` is true, the module is cut by input: the whole module has
    `full` inputs, and `ranges` has the member's one range of inputs. Otherwise the module is cut by output: the whole
    module has `full` outputs, and `ranges` has the member's ranges of outputs, one or more.
    """

    full: int
    ranges: tuple[Range, ...]
    by_input: bool = False


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The position of a member in its group: member `rank` of the `size` members that share the layers of pipeline
    stage `stage`. If there are fewer KV heads than members, several members hold the same head.
    """

    rank: int
    size: int
    stage: int = 0
    stages: int = 1

    @classmethod
    def of_group(cls, stages: int, size: int) -> list[ModelShard]:
        """Returns the shards of all members by rank in the group: the members of a stage have consecutive ranks."""
        return [cls(rank, size, stage, stages) for stage in range(stages) for rank in range(size)]

    @property
    def group_rank(self) -> int:
        return self.stage * self.size + self.rank

    @property
    def group_size(self) -> int:
        return self.stages * self.size

    def layers(self, arch: Architecture) -> range:
        """Returns the layers of this member's stage. The numbers of layers of any two stages differ by at most one."""
        return range(*(edge * arch.num_layers // self.stages for edge in (self.stage, self.stage + 1)))

    def part(self, count: int) -> Range:
        """Returns this member's share of `count` columns or rows, as two indexes: the first column or row of the share,
        and the one after the last. The sizes of any two members' shares differ by at most one.
        """
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def kv_heads(self, arch: Architecture) -> Range:
        first = self.rank * arch.num_kv_heads // self.size
        return first, first + max(1, arch.num_kv_heads // self.size)

    def architecture(self, arch: Architecture) -> Architecture:
        """Returns the architecture of this member's part. Raises ConfigError when the heads cannot be divided among the
        members.
        """
        check_divides(arch, self.size, self.stages)

        def own(count: int) -> int:
            first, end = self.part(count)
            return end - first

        first, end = self.kv_heads(arch)
        experts = None if arch.experts is None else replace(arch.experts, ffn_size=own(arch.experts.ffn_size))
        return replace(
            arch,
            num_heads=own(arch.num_heads),
            num_kv_heads=end - first,
            ffn_size=own(arch.ffn_size),
            vocab_size=own(arch.vocab_size),
            experts=experts,
        )


def linear_cuts(arch: Architecture, index: int, shard: ModelShard) -> dict[str, ModuleCut]:
    """Returns, for each linear module of a layer, the part of the module that a member holds. The keys are the modules'
    paths in the layer.

    Each member holds some heads and some feed-forward columns. A projection that computes heads or columns is cut by
    output. A projection that reads them is cut by input. Members then exchange only two sums per layer (Shoeybi et
    al. 2019).
    """
    dim = arch.head_dim
    heads = _scaled(shard.part(arch.num_heads), dim)
    kv, ffn = _scaled(shard.kv_heads(arch), dim), shard.part(arch.ffn_size)
    kv_size = arch.num_kv_heads * dim
    inputs = {"attention_out": heads, "down": ffn}
    outputs = {
        "qkv": [(arch.num_heads * dim, heads), (kv_size, kv), (kv_size, kv)],
        "gate_up": [(arch.ffn_size, ffn)] * (2 if arch.gated_ffn else 1),
    }
    cuts = dict[str, ModuleCut]()
    for kind, by in projections(arch, index).items():
        if kind in inputs:
            (path,) = by.paths
            cuts[path] = ModuleCut(by.columns, (inputs[kind],), by_input=True)
            continue
        parts = outputs[kind]
        if len(by.paths) == len(parts):
            cuts |= {path: ModuleCut(size, (part,)) for path, (size, part) in zip(by.paths, parts, strict=True)}
        else:
            cuts[by.paths[0]] = ModuleCut(sum(size for size, _ in parts), behind_one_another(parts))
    return cuts


def behind_one_another(parts: list[tuple[int, Range]]) -> tuple[Range, ...]:
    """Translates ranges within several tensors into ranges within the concatenation of these tensors. `parts` has, for
    each tensor, the size of the whole tensor and a range within the tensor.
    """
    ranges, start = list[Range](), 0
    for size, (first, end) in parts:
        ranges.append((start + first, start + end))
        start += size
    return tuple(ranges)


def _scaled(by: Range, size: int) -> Range:
    return by[0] * size, by[1] * size


def check_divides(arch: Architecture, size: int, stages: int = 1) -> None:
    """Raises ConfigError if `size` members cannot share the heads, or if `stages` stages cannot share the layers."""
    if size * stages > 1 and arch.vision is not None:
        raise ConfigError(
            "a model that reads images runs in one process.", hint="Leave tensor_parallel and pipeline_parallel out."
        )
    if stages > arch.num_layers:
        raise ConfigError(
            f"pipeline_parallel {stages} is more than the model's {arch.num_layers} layers.",
            hint=f"It may be {arch.num_layers} at most.",
        )
    if not _divides(arch, size):
        sizes = [str(each) for each in range(1, arch.num_heads + 1) if _divides(arch, each)]
        raise ConfigError(
            f"tensor_parallel {size} does not divide the model's {arch.num_heads} heads and {arch.num_kv_heads} KV "
            "heads.",
            hint=f"It may be {', '.join(sizes)}.",
        )


def _divides(arch: Architecture, size: int) -> bool:
    divides_kv = arch.num_kv_heads % size == 0 or size % arch.num_kv_heads == 0
    return arch.num_heads % size == 0 and divides_kv and size <= arch.vocab_size
