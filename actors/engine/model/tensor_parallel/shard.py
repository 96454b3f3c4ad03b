"""One member's part of a model: its heads, feed-forward columns and rows of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytide.actors.models.architecture import Architecture
from raytide.core.errors import ConfigError

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ModelShard:
    """GroupMember `rank` of `size`. KV heads that are fewer than members are held by several of them."""

    rank: int
    size: int

    def part(self, count: int) -> Range:
        """Returns this member's share of so many columns or rows, from and to; shares differ by one at most."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def kv_heads(self, arch: Architecture) -> Range:
        first = self.rank * arch.num_kv_heads // self.size
        return first, first + max(1, arch.num_kv_heads // self.size)

    def architecture(self, arch: Architecture) -> Architecture:
        """Returns what this member computes. Raises ConfigError when heads cannot be divided so."""
        check_divides(arch, self.size)

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


def check_divides(arch: Architecture, size: int) -> None:
    """Raises ConfigError unless so many members can share the heads."""
    if size > 1 and arch.vision is not None:
        raise ConfigError("a model that reads images runs in one process.", hint="Leave tensor_parallel out.")
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
