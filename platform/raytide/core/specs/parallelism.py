"""How the ranks of a gang share a model and a batch: five axes, as a pure function of how many ranks there are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from raytide.core.config import Config
from raytide.core.errors import ConfigError

__all__ = ["AXES", "LOOPED", "SPLIT_BACKWARD", "V_SHAPED", "Parallelism", "Schedule", "Sizes"]

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
]
LOOPED: frozenset[Schedule] = frozenset({"interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"})
"""Each rank has several stages, `pipeline` apart."""
V_SHAPED: frozenset[Schedule] = frozenset({"zbv_zero_bubble", "dualpipe_v"})
"""Each rank has two stages; the first rank has the first and the last."""
SPLIT_BACKWARD: frozenset[Schedule] = frozenset({"interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"})
"""Gradients of inputs come first and those of weights later, which fills the pipeline's bubbles."""
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


class Parallelism(Config):
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
    stages: int | None = Field(default=None, ge=2)
    """How many stages each pipeline rank has: 2 when left out in the looped schedules; the others fix it."""

    @property
    def rank_stages(self) -> int:
        """Stages on each rank of the pipeline."""
        if self.schedule in LOOPED:
            return self.stages or 2
        return 2 if self.schedule in V_SHAPED and self.pipeline > 1 else 1

    @property
    def total_stages(self) -> int:
        return self.pipeline * self.rank_stages if self.pipeline > 1 else 1

    @property
    def frees_after_forward(self) -> bool:
        """Whether weights are resharded between forward and backward. A schedule that splits its backward would then
        lose gradients in silence (measured: a loss off by 0.2 after 10 steps), so there they stay whatever zero says.
        """
        return self.zero == 3 and not (self.pipeline > 1 and self.schedule in SPLIT_BACKWARD)

    def stages_of(self, rank: int) -> list[int]:
        """The stages of one rank of the pipeline, in their order."""
        if self.pipeline > 1 and self.schedule in V_SHAPED:
            return [rank, 2 * self.pipeline - 1 - rank]
        return [rank + turn * self.pipeline for turn in range(self.rank_stages if self.pipeline > 1 else 1)]

    def stage_layers(self, stage: int, layers: int) -> range:
        """The layers of one stage. Middle stages take the remainder: the first embeds and the last predicts."""
        count, more = divmod(layers, self.total_stages)
        skip = (self.total_stages - more) // 2
        sizes = [count + (skip <= index < skip + more) for index in range(self.total_stages)]
        first = sum(sizes[:stage])
        return range(first, first + sizes[stage])

    def microbatches(self, rows: int, size: int) -> tuple[int, int]:
        """(How many, of how many sequences) for `rows` sequences of a data rank in microbatches of at most `size`.

        A pipeline wants at least as many as it has stages, and full rounds of them: smaller ones when there are rows
        enough, else some that do not count.
        """
        if self.pipeline == 1:
            return math.ceil(rows / size), size
        size = max(1, min(size, rows // self.min_microbatches))
        count = max(math.ceil(rows / size), self.min_microbatches)
        if self.schedule in LOOPED and self.schedule != "looped_bfs":
            count = math.ceil(count / self.pipeline) * self.pipeline
        return count, size

    @property
    def min_microbatches(self) -> int:
        """Fewer than so many leave stages without work."""
        return self.total_stages if self.schedule == "dualpipe_v" else self.pipeline

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
