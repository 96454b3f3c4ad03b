"""The training workload and the strategy to run it. These two parts of a TrainSpec determine memory and time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raytide.core.specs.model import LoraSpec
from raytide.core.specs.optim import OptimSpec
from raytide.core.specs.parallelism import Parallelism, Sizes
from raytide.core.specs.train import MemorySpec, Precision, TrainSpec
from raytide.sizing.model_shape import ModelShape

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""The bytes of a value in computation; fp8 keeps bf16 around its products."""
STATE_BYTES = 4
"""The bytes of each element of weights, gradient sums and moments, which are fp32 at every precision."""


@dataclass(frozen=True, slots=True)
class TrainWorkload:
    """The work of one training step: the model, the batch, the precision and the optimizer."""

    model: ModelShape
    seq_len: int
    global_batch: int
    """The number of sequences in a step."""
    steps: int = 1
    precision: Precision = "bf16"
    optimizer: OptimSpec = field(default_factory=OptimSpec)
    lora: LoraSpec | None = None

    @classmethod
    def from_spec(cls, spec: TrainSpec, model: ModelShape) -> TrainWorkload:
        lora = None if spec.finetune is None else spec.finetune.lora
        return cls(model, spec.seq_len, spec.global_batch, spec.steps, spec.precision, spec.optim, lora)

    @property
    def bytes_each(self) -> int:
        """The bytes of one element of a weight or an activation during computation."""
        return BYTES[self.precision]

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def flops_per_token(self) -> float:
        return self.model.flops_per_token(self.seq_len, frozen=self.lora is not None)


@dataclass(frozen=True, slots=True)
class Strategy:
    """The parallel layout of a training on a number of ranks, with its micro-batch and memory options."""

    sizes: Sizes
    layout: Parallelism = field(default_factory=Parallelism)
    micro_batch: int = 1
    """The most sequences that a rank computes at once."""
    memory: MemorySpec = field(default_factory=MemorySpec)

    @classmethod
    def from_spec(cls, spec: TrainSpec, world: int) -> Strategy:
        """Returns the strategy of a spec on `world` ranks. Raises ConfigError if the layout needs more ranks."""
        sizes = spec.layout.sizes(world)
        return cls(sizes, spec.layout, spec.first_micro_batch(sizes), spec.memory)

    @property
    def world(self) -> int:
        return self.sizes.world

    def rows(self, workload: TrainWorkload) -> int:
        """Returns the number of sequences that each data rank computes in a step. Some sequences of the last rank may
        be padding.
        """
        return -(-workload.global_batch // self.sizes.data)

    def microbatches(self, workload: TrainWorkload) -> tuple[int, int]:
        """Returns the number of micro-batches in a step and the size of a micro-batch."""
        return self.layout.microbatches(self.rows(workload), min(self.micro_batch, self.rows(workload)))

    def with_memory(self, **changes: object) -> Strategy:
        """Returns the strategy with some of its memory options changed."""
        return replace(self, memory=self.memory.model_copy(update=changes))
