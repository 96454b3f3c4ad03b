"""Estimates the memory that one rank of raytide's trainer needs, for each purpose and at the peak.

The peak occurs at one of two moments, whichever needs more memory. The sum of all terms would be too
large, because the terms do not all exist at the same moment:
- At the end of the forward pass with the most micro-batches in flight, activations and logits exist.
  Gradients exist only if earlier micro-batches have produced them.
- At the end of the backward pass, all gradients exist, and the activations are freed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from raytide.core.specs.parallelism import LOOPED
from raytide.sizing.memory import activations
from raytide.sizing.memory.activations import Slice
from raytide.sizing.memory.states import StateBytes, busiest_pipeline_ranks, rank_states
from raytide.sizing.workload import STATE_BYTES, Strategy, TrainWorkload

FRAGMENTATION = 0.07
"""The share of the allocated memory that PyTorch's caching allocator cannot use: 5 to 10 % (measured runs vary)."""
CONTEXT_BYTES = 2 << 30
"""The bytes of one process's CUDA context, NCCL buffers and library workspaces: 1 to 3 GiB."""
_PREFETCHED = 2
"""The number of layers whose weights FSDP2 has gathered at once: the one that runs and the next."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The properties of a device that determine its memory use."""

    bytes: float
    on_cpu: bool = False
    fragmentation: float = FRAGMENTATION
    context_bytes: float = CONTEXT_BYTES
    activation_scale: float = 1.0
    """The measured divided by the predicted bytes of activations in earlier runs."""

    @classmethod
    def cpu(cls, nbytes: float = 0.0) -> Hardware:
        return cls(nbytes, on_cpu=True, fragmentation=0.0, context_bytes=0.0)


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that one rank needs, by purpose. Not all of these bytes are needed at the same time: `peak` is the
    largest number of bytes that are needed at once.
    """

    weights: int
    gradients: int
    optimizer: int
    """The optimizer state on the device; 0 if it is offloaded."""
    gathered: float
    """The weights gathered for computation, in its dtype."""
    reducing: float
    """The gradients of a layer before they are reduced; with ZeRO-1, those of all layers between micro-batches."""
    layers: float
    """The activations of all micro-batches in flight, on the device."""
    recomputed: float
    """The activations of the layer that the backward pass recomputes."""
    logits: float
    """The log-probabilities kept for the backward pass."""
    loss: float
    """The logits and their gradient while the loss runs."""
    micro_batch_activations: float
    """The activations and kept logits of one micro-batch, including offloaded ones."""
    earlier_gradients: float
    """The gradients that exist at the end of a forward pass."""
    context: float
    fragmentation_share: float
    host: float
    """The bytes of this rank in the node's memory (offloaded weights, gradients, state and activations)."""
    disk: float

    @cached_property
    def forward_end(self) -> Mapping[str, float]:
        """The bytes in use at the end of the last layer's forward pass, by purpose."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "gathered weights": self.gathered,
            "gradients": self.earlier_gradients,
            "activations": self.layers,
            "logits": self.logits + self.loss,
        }

    @cached_property
    def backward_end(self) -> Mapping[str, float]:
        """The bytes in use at the moment when the backward pass computes the gradient of the first layer. The keys are
        the purposes of the memory.
        """
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "gathered weights": self.gathered,
            "gradients": self.gradients + self.reducing,
            "activations": self.recomputed,
            "logits": 0.0,
        }

    @cached_property
    def terms(self) -> Mapping[str, float]:
        """The bytes in use at the moment of highest use, by purpose, including fragmentation and context. Their sum is
        `peak`.
        """
        most = max(self.forward_end, self.backward_end, key=lambda each: sum(each.values()))
        fragmentation = sum(most.values()) * self.fragmentation_share / (1.0 - self.fragmentation_share)
        return {**most, "fragmentation": fragmentation, "context": self.context}

    @cached_property
    def peak(self) -> float:
        """The bytes of memory that the device needs."""
        return sum(self.terms.values())

    @property
    def largest_term(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def estimate_rank(
    workload: TrainWorkload, strategy: Strategy, hardware: Hardware, pipeline_rank: int = 0
) -> MemoryEstimate:
    """Returns the memory of the rank whose index is `pipeline_rank` on the pipeline axis and 0 on all other axes."""
    model, sizes, layout, memory = workload.model, strategy.sizes, strategy.layout, strategy.memory
    states = rank_states(workload, strategy, pipeline_rank)
    count, sequences = strategy.microbatches(workload)
    part = Slice(sequences, workload.seq_len, sizes.tensor, sizes.context, workload.bytes_each, on_cpu=hardware.on_cpu)
    kept, whole, first, logits, loss = 0.0, 0.0, 0.0, 0.0, 0.0
    for stage in layout.stages_of(pipeline_rank):
        flight = in_flight(strategy, stage, count)
        for sparse, layers in model.layer_kinds(layout.stage_layers(stage, model.layers)):
            layer = layers * activations.checkpoint_bytes(model, part, memory, sparse=sparse)
            kept, first = kept + flight * layer, first + layer
            whole = max(whole, activations.layer_bytes(model, part, sparse=sparse))
        if stage == 0:
            kept, first = kept + flight * (ids := activations.first_bytes(model, part)), first + ids
        if stage == layout.total_stages - 1:
            logits, loss = activations.last_bytes(model, part, memory.loss_chunk)
            first += logits
    kept, first, whole = (each * hardware.activation_scale for each in (kept, first, whole))
    place = memory.activations
    away = kept if place != "none" else 0.0
    resident = kept - away + (whole if place != "none" else 0.0)
    has_earlier, is_resident = count > 1, memory.parameters == "none"
    away_bytes = {"cpu": 0.0, "disk": 0.0, "none": 0.0}
    away_bytes[place] += away
    away_bytes[memory.optimizer] += states.optimizer
    away_bytes[memory.parameters] += states.weights + states.gradients
    reducing = _reducing(workload, strategy, states, has_earlier=has_earlier)
    return MemoryEstimate(
        weights=states.weights if is_resident else 0,
        gradients=states.gradients if is_resident else 0,
        optimizer=states.optimizer if memory.optimizer == "none" else 0,
        gathered=_gathered(workload, strategy, states),
        reducing=reducing,
        layers=resident,
        recomputed=whole if memory.checkpointing != "none" or place != "none" else 0.0,
        logits=logits,
        loss=loss,
        micro_batch_activations=first,
        earlier_gradients=states.gradients + (reducing if layout.zero == 1 else 0.0)
        if has_earlier and is_resident
        else 0.0,
        context=hardware.context_bytes,
        fragmentation_share=hardware.fragmentation,
        host=away_bytes["cpu"],
        disk=away_bytes["disk"],
    )


def estimate(
    workload: TrainWorkload, strategy: Strategy, hardware: Hardware, pipeline_rank: int | None = None
) -> MemoryEstimate:
    """Returns the memory of the given pipeline rank. If no rank is given, returns the memory of the pipeline rank that
    needs the most.
    """
    if pipeline_rank is not None:
        return estimate_rank(workload, strategy, hardware, pipeline_rank)
    ranks = busiest_pipeline_ranks(strategy.layout)
    return max((estimate_rank(workload, strategy, hardware, rank) for rank in ranks), key=lambda each: each.peak)


def in_flight(strategy: Strategy, stage: int, microbatches: int) -> float:
    """Returns the number of micro-batches whose activations a pipeline stage holds at once, by schedule:

    - 1F1B: one for each stage from this one to the last (Narayanan et al. 2021).
    - Interleaved: p (1 + (p-1) / (p v)), for p ranks with v stages each.
    - V-shaped: p on every rank.
    - GPipe and looped BFS: all micro-batches of the step.
    """
    layout, ranks = strategy.layout, strategy.layout.pipeline
    if ranks == 1:
        return 1.0
    if layout.schedule in ("gpipe", "looped_bfs"):
        return float(microbatches)
    if layout.schedule == "1f1b":
        return float(min(ranks - stage, microbatches))
    if layout.schedule in LOOPED:
        return min(float(microbatches), ranks * (1.0 + (ranks - 1) / (ranks * layout.rank_stages)))
    return float(min(ranks, microbatches))


def _gathered(workload: TrainWorkload, strategy: Strategy, states: StateBytes) -> float:
    """Returns the bytes of gathered weights.

    If they stay for the whole step, these are all weights with which the rank computes; else those outside of layers
    and of two layers. A single rank in fp32 gathers none.
    """
    ranks = strategy.sizes.shard * strategy.sizes.context
    is_resident = strategy.memory.parameters == "none"
    if ranks == 1 and workload.bytes_each == STATE_BYTES and is_resident:
        return 0.0
    frees = strategy.layout.frees_after_forward and (ranks > 1 or not is_resident)
    elements = states.outside + _PREFETCHED * states.largest_layer if frees else states.computed
    return workload.bytes_each * min(elements, states.computed)


def _reducing(workload: TrainWorkload, strategy: Strategy, states: StateBytes, *, has_earlier: bool) -> float:
    """Returns the bytes of gradients that are not reduced yet. ZeRO-1 and pipelines sum the gradients of all layers in
    fp32 over the micro-batches.
    """
    ranks = strategy.sizes.shard * strategy.sizes.context * strategy.sizes.replicate
    layer = min(states.largest_layer, states.computed_trained)
    one: float = (workload.bytes_each + STATE_BYTES) * max(layer, min(states.outside, states.computed_trained))
    if ranks == 1 and workload.bytes_each == STATE_BYTES and strategy.memory.parameters == "none":
        one = 0.0
    accumulates = strategy.layout.zero == 1 or strategy.layout.pipeline > 1
    whole = STATE_BYTES * states.computed_trained if accumulates and has_earlier and ranks > 1 else 0.0
    return one + whole
