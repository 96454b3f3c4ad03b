"""How the ranks of a gang share a model and a batch: five axes, as a pure function of how many ranks there are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from raytide.core.config import Config
from raytide.core.errors import ConfigError

__all__ = ["AXES", "Layout", "Schedule", "Sizes"]

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
]
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""Outermost first: neighbours in rank talk most."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks each axis has."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """In the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """How many parts a global batch is cut into."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        return " x ".join(named) or "1 rank"


class Layout(Config):
    """The axes of the mesh. The default shards over all ranks (ZeRO-3)."""

    replicate: int = Field(default=1, ge=1)
    """Copies of the sharded model, whose gradients are summed: HSDP, or DDP where shard is 1."""
    shard: int | None = Field(default=None, ge=1)
    """Ranks among which each copy's weights, gradients and optimizer state are divided; None takes what the other axes
    leave, which lets the gang grow and shrink."""
    tensor: int = Field(default=1, ge=1)
    """Ranks among which each matrix is divided, and between layers the sequence."""
    pipeline: int = Field(default=1, ge=1)
    """Ranks that each hold some of the layers."""
    context: int = Field(default=1, ge=1)
    """Ranks among which each sequence is divided."""
    zero: Literal[1, 2, 3] = 3
    """What stays divided during a step: the optimizer's state (1), also the gradients (2), also the weights (3)."""
    schedule: Schedule = "1f1b"
    """Of the pipeline's microbatches."""

    def sizes(self, world: int) -> Sizes:
        """The largest mesh that `world` ranks can form; ConfigError when they are too few for any."""
        fixed = self.replicate * self.tensor * self.pipeline * self.context
        shard = self.shard or max(1, world // fixed)
        sizes = Sizes(self.pipeline, self.replicate, shard, self.context, self.tensor)
        if sizes.world > world:
            raise ConfigError(
                f"a layout of {sizes} needs {sizes.world} ranks; there are {world}.",
                hint="Lower an axis of layout, or raise the gang's min_members.",
            )
        return sizes
