"""The parallel layout of a training gang: the sizes of five mesh axes, computed from the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from raytide.core.config import Config
from raytide.core.errors import ConfigError

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
]
LOOPED: frozenset[Schedule] = frozenset({"interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"})
"""Schedules with several stages on each rank, `pipeline` stages apart."""
V_SHAPED: frozenset[Schedule] = frozenset({"zbv_zero_bubble", "dualpipe_v"})
"""Schedules with two stages on each rank; the first rank has the first and the last stage."""
SPLIT_BACKWARD: frozenset[Schedule] = frozenset({"interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"})
"""Schedules that compute input gradients first and weight gradients later, to fill the pipeline's bubbles."""
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
"""The axes of the mesh, outermost first. Neighbouring ranks are on the innermost axes, which communicate most."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The number of ranks on each axis of the mesh."""

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
        """The sizes of the axes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """The number of data ranks. A global batch is split among them."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        named = [f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True) if size > 1]
        return " x ".join(named) or "1 rank"


class Parallelism(Config):
    """The axes of the mesh. By default the model is sharded over all ranks (ZeRO-3)."""

    replicate: int = Field(default=1, ge=1)
    """The copies of the sharded model, whose gradients are summed: HSDP, or DDP if `shard` is 1."""
    shard: int | None = Field(default=None, ge=1)
    """The ranks that shard each copy's weights, gradients and optimizer state. None uses all ranks that the other axes
    leave, so the gang can grow and shrink.
    """
    tensor: int = Field(default=1, ge=1)
    """The ranks that shard each matrix and, between layers, the sequence."""
    pipeline: int = Field(default=1, ge=1)
    """The ranks that each hold some of the layers."""
    context: int = Field(default=1, ge=1)
    """The ranks that shard each sequence."""
    zero: Literal[1, 2, 3] = 3
    """The state that stays sharded during a step: optimizer state (1), also gradients (2), also weights (3)."""
    schedule: Schedule = "1f1b"
    """The order of the pipeline's micro-batches."""
    stages: int | None = Field(default=None, ge=2)
    """The number of stages on each pipeline rank; 2 by default in looped schedules. Other schedules fix it."""

    @property
    def rank_stages(self) -> int:
        """The number of stages on each pipeline rank."""
        if self.schedule in LOOPED:
            return self.stages or 2
        return 2 if self.schedule in V_SHAPED and self.pipeline > 1 else 1

    @property
    def total_stages(self) -> int:
        return self.pipeline * self.rank_stages if self.pipeline > 1 else 1

    @property
    def frees_after_forward(self) -> bool:
        """True if weights are resharded between the forward and the backward pass.

        False for a schedule that splits its backward pass. With such a schedule, resharding would silently lose
        gradients (measured: the loss was off by 0.2 after 10 steps).
        """
        return self.zero == 3 and not (self.pipeline > 1 and self.schedule in SPLIT_BACKWARD)

    def stages_of(self, rank: int) -> list[int]:
        """Returns the stages of one pipeline rank, in order."""
        if self.pipeline > 1 and self.schedule in V_SHAPED:
            return [rank, 2 * self.pipeline - 1 - rank]
        return [rank + turn * self.pipeline for turn in range(self.rank_stages if self.pipeline > 1 else 1)]

    def stage_layers(self, stage: int, layers: int) -> range:
        """Returns the layers of one pipeline stage. If the layers do not divide evenly, middle stages are the first to
        get an additional layer, because the first stage also has the embedding, and the last stage also has the output
        head.
        """
        count, more = divmod(layers, self.total_stages)
        skip = (self.total_stages - more) // 2
        sizes = [count + (skip <= index < skip + more) for index in range(self.total_stages)]
        first = sum(sizes[:stage])
        return range(first, first + sizes[stage])

    def microbatches(self, rows: int, size: int) -> tuple[int, int]:
        """Returns the number and the size of the micro-batches for the `rows` sequences of a data rank. The size is at
        most `size`.

        A pipeline needs at least `min_microbatches` micro-batches. Micro-batches get smaller to reach this number. Most
        looped schedules need a multiple of the pipeline's ranks. If there are too few rows for the number of
        micro-batches, some micro-batches are padding.
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
        """The smallest number of micro-batches with which every pipeline stage has work."""
        return self.total_stages if self.schedule == "dualpipe_v" else self.pipeline

    def sizes(self, world: int) -> Sizes:
        """Returns the largest mesh that `world` ranks can form. Raises ConfigError if there are too few ranks."""
        fixed = self.replicate * self.tensor * self.pipeline * self.context
        shard = self.shard or max(1, world // fixed)
        sizes = Sizes(self.pipeline, self.replicate, shard, self.context, self.tensor)
        if sizes.world > world:
            raise ConfigError(
                f"a layout of {sizes} needs {sizes.world} ranks; there are {world}.",
                hint="Lower an axis of layout, or raise the gang's min_members.",
            )
        return sizes
