"""Predicts the time of a training step, split into the model's own arithmetic and each additional cost.

Compute follows a roofline model. Matrix products and attention run at a share of the device's peak. All other
operations run at the device's memory bandwidth. Collectives follow the alpha-beta model with ring algorithms: T =
alpha * hops + bytes / bandwidth. The part of a collective that overlaps with compute does not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from raytide.core.specs.parallelism import AXES, SPLIT_BACKWARD, V_SHAPED, Schedule, Sizes
from raytide.sizing.devices import Accelerator
from raytide.sizing.memory import activations
from raytide.sizing.memory.activations import Slice
from raytide.sizing.memory.states import StateBytes, busiest_pipeline_ranks, rank_states
from raytide.sizing.workload import STATE_BYTES, Strategy, TrainWorkload

_FORWARD_PASSES, _BACKWARD_PASSES = 2.0, 3.0
"""The number of times that each saved activation is transferred from or to memory: in the forward pass written and
read; in the backward pass read, and its gradient written and read.
"""
_LOSS_PASSES = 3.0
_LAYER_OPERATIONS = 110
"""The number of operations that one layer launches forward and backward in eager mode; compiled layers launch about a
fifth.
"""
_COMPILED = 0.2
_UPDATE_OPERATIONS = 12
_PCIE = 20e9
"""The bytes a second between a GPU and the node's memory, for offloading."""
_DISK = 2e9


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between the ranks of one mesh axis."""

    ranks: int
    bandwidth: float
    """The bytes a second that each rank sends and receives."""
    latency_s: float

    def all_gather(self, whole_bytes: float) -> float:
        """Returns the time in seconds of an all-gather or a reduce-scatter of `whole_bytes` bytes. For n ranks, (n-1)/n
        of the bytes pass through each rank.
        """
        if self.ranks == 1:
            return 0.0
        hops = self.ranks - 1
        return self.latency_s * hops + whole_bytes * hops / self.ranks / self.bandwidth

    def all_reduce(self, nbytes: float) -> float:
        """Returns the time in seconds of an all-reduce of `nbytes` bytes, which is a reduce-scatter followed by an
        all-gather.
        """
        return 2.0 * self.all_gather(nbytes)

    def send(self, nbytes: float) -> float:
        return 0.0 if self.ranks == 1 else self.latency_s + nbytes / self.bandwidth


def axis_links(sizes: Sizes, device: Accelerator, devices_per_node: int) -> dict[str, Link]:
    """Returns the link of each mesh axis.

    Ranks are numbered with the tensor axis innermost. An axis whose ranks are all on one node uses the node's own
    links. An axis that spans nodes gets a share of each node's network, because all groups with ranks on the node share
    the network.
    """
    links, inside = dict[str, Link](), 1
    for axis in reversed(AXES):
        ranks = getattr(sizes, axis)
        if inside * ranks <= devices_per_node:
            links[axis] = Link(ranks, device.link, device.link_latency_s)
        else:
            together = max(1, devices_per_node // inside)
            bandwidth = min(device.link, device.network * together) if together > 1 else device.network
            links[axis] = Link(ranks, bandwidth, device.network_latency_s)
        inside *= ranks
    joined = Link(
        sizes.shard * sizes.context,
        min(links["shard"].bandwidth, links["context"].bandwidth) if sizes.context > 1 else links["shard"].bandwidth,
        max(links["shard"].latency_s, links["context"].latency_s) if sizes.context > 1 else links["shard"].latency_s,
    )
    return {**links, "shard": joined if sizes.shard * sizes.context > 1 else links["shard"]}


@dataclass(frozen=True)
class StepTime:
    """The time of one training step in seconds, split into parts that add up to `total`."""

    arithmetic: float
    """The time of the model's FLOPs at the device's peak, which MFU counts as useful."""
    below_peak: float
    """The additional time of matrix products, because no kernel reaches the peak."""
    memory_bound: float
    """The time of norms, activations and the loss, at the memory bandwidth."""
    launches: float
    recompute: float
    optimizer: float
    offload: float
    tensor: float
    """The exposed collectives of the tensor axis; the next fields are those of the other axes."""
    context: float
    shard: float
    replicate: float
    pipeline: float
    bubble: float
    padding: float
    """The time of sequences that only fill up micro-batches."""
    tokens: int
    flops: float
    """The model FLOPs of the whole step."""
    peak_flops: float
    """The peak FLOP/s of all devices together."""

    @cached_property
    def parts(self) -> Mapping[str, float]:
        return {
            "model arithmetic at peak": self.arithmetic,
            "kernels below peak": self.below_peak,
            "memory-bound operations": self.memory_bound,
            "launches": self.launches,
            "recomputation": self.recompute,
            "optimizer": self.optimizer,
            "offload": self.offload,
            "tensor collectives": self.tensor,
            "context collectives": self.context,
            "shard collectives": self.shard,
            "replica collectives": self.replicate,
            "pipeline transfers": self.pipeline,
            "pipeline bubble": self.bubble,
            "padding": self.padding,
        }

    @cached_property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """The model FLOPs utilization. It is the model's FLOPs divided by the FLOPs that the devices could do at their
        peak in the time of the step.
        """
        return self.flops / (self.peak_flops * self.total)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total

    @property
    def largest_waste(self) -> str:
        parts = {name: seconds for name, seconds in self.parts.items() if name != "model arithmetic at peak"}
        return max(parts, key=lambda name: parts[name])


def bubble_ratio(ranks: int, microbatches: int, stages: int = 1) -> float:
    """Returns the pipeline's idle time divided by its ideal time: (p-1) / (v m), for p ranks, v stages per rank, and m
    micro-batches (Narayanan et al. 2021).
    """
    return (ranks - 1) / (stages * microbatches)


def step_time(workload: TrainWorkload, strategy: Strategy, device: Accelerator, devices_per_node: int) -> StepTime:
    """Returns the time of one optimizer step of the whole gang. The result lists the parts of this time separately."""
    sizes, layout, memory = strategy.sizes, strategy.layout, strategy.memory
    count, sequences = strategy.microbatches(workload)
    part = Slice(sequences, workload.seq_len, sizes.tensor, sizes.context, workload.bytes_each, on_cpu=device.is_cpu)
    cost = max(
        (_pass_cost(workload, strategy, device, part, rank) for rank in busiest_pipeline_ranks(layout)),
        key=lambda each: each.seconds,
    )
    peak = device.peak_flops(workload.precision) * sizes.world
    flops = workload.tokens_per_step * workload.flops_per_token
    micro = cost.seconds * device.pace
    whole = count * micro
    padded = count * sequences * sizes.data
    used = workload.global_batch / padded
    links = axis_links(sizes, device, devices_per_node)
    states = rank_states(workload, strategy)
    layers = max(1, -(-workload.model.layers // layout.pipeline))
    stream = workload.bytes_each * part.tokens * workload.model.width
    again = 1.5 if memory.checkpointing == "full" else 1.0
    tensor = count * layers * 4 * again * links["tensor"].all_gather(stream) if sizes.tensor > 1 else 0.0
    kv = 2 * workload.bytes_each * part.tokens * sizes.context * workload.model.kv_width / sizes.tensor
    context = count * layers * 2 * again * links["context"].all_gather(kv) if sizes.context > 1 else 0.0
    gather = links["shard"].all_gather(workload.bytes_each * states.computed)
    scatter = links["shard"].all_gather(STATE_BYTES * states.computed_trained)
    gathers = count * (2 if layout.frees_after_forward else 1) if layout.zero == 3 else 1
    scatters = count if layout.zero >= 2 and layout.pipeline == 1 else 1
    hidden = device.overlap * whole
    sharded = gathers * gather + scatters * scatter
    shard = max(sharded - hidden, (gather + scatter) / (layers + 1)) if sharded else 0.0
    hidden = max(0.0, hidden - sharded)
    reduced = links["replicate"].all_reduce(states.gradients)
    replicate = max(reduced - hidden, reduced / (layers + 1))
    sends = 2 * count * layout.rank_stages * links["pipeline"].send(stream / sizes.tensor)
    pipeline = sends * (1.0 - device.overlap) if layout.pipeline > 1 else 0.0
    ideal = whole + tensor + context
    bubble = ideal * bubble_ratio(layout.pipeline, count, layout.rank_stages) * _bubble_factor(layout.schedule)
    arithmetic = flops / peak
    recompute, launches = cost.recompute * device.pace * count, cost.launches * device.pace * count
    memory_bound = cost.memory_bound * device.pace * count
    products = whole - recompute - launches - memory_bound
    return StepTime(
        arithmetic=arithmetic,
        below_peak=products * used - arithmetic,
        memory_bound=memory_bound * used,
        launches=launches * used,
        recompute=recompute * used,
        optimizer=_update_seconds(workload, strategy, device, states.weights, states.optimizer),
        offload=_offload_seconds(workload, strategy, part, states, layers, whole * device.overlap),
        tensor=tensor,
        context=context,
        shard=shard,
        replicate=replicate,
        pipeline=pipeline,
        bubble=bubble,
        padding=whole * (1.0 - used),
        tokens=workload.tokens_per_step,
        flops=flops,
        peak_flops=peak,
    )


@dataclass(frozen=True, slots=True)
class _PassCost:
    """The seconds of one micro-batch on one pipeline rank, forward and backward."""

    products: float
    memory_bound: float
    launches: float
    recompute: float

    @property
    def seconds(self) -> float:
        return self.products + self.memory_bound + self.launches + self.recompute


def _pass_cost(workload: TrainWorkload, strategy: Strategy, device: Accelerator, part: Slice, rank: int) -> _PassCost:
    model, layout, memory = workload.model, strategy.layout, strategy.memory
    stages = layout.stages_of(rank)
    layers = sum(len(layout.stage_layers(stage, model.layers)) for stage in stages)
    is_last = layout.total_stages - 1 in stages
    per_layer = (model.matrix_parameters - model.vocab * model.width) / model.layers
    peak = device.peak_flops(workload.precision)
    narrow = (model.expert_ffn if model.sparse_layers else model.width) / part.tensor
    forward = 2.0 * per_layer * layers * part.own_tokens / device.product_flops(workload.precision, narrow)
    seen = workload.seq_len if device.is_cpu else model.spans(workload.seq_len) / model.layers  # CPUs skip no scores
    scores = 2.0 * model.attention_width * seen * layers * part.own_tokens
    forward += scores / (peak * device.attention_efficiency)  # the causal half
    head = 2.0 * model.vocab * model.width * part.own_tokens / device.product_flops(workload.precision, model.width)
    kinds = [kind for stage in stages for kind in model.layer_kinds(layout.stage_layers(stage, model.layers))]
    saved = sum(count * activations.layer_bytes(model, part, sparse=sparse) for sparse, count in kinds)
    kept, loss = activations.last_bytes(model, part, memory.loss_chunk) if is_last else (0.0, 0.0)
    passes = _COMPILED_PASSES if memory.compile else 1.0
    moved = saved * (_FORWARD_PASSES + _BACKWARD_PASSES) * passes + (kept + loss) * _LOSS_PASSES
    again = forward if memory.checkpointing == "full" else 0.0
    if memory.checkpointing != "none":
        again += saved * _FORWARD_PASSES * passes / device.bandwidth
    backward = 1.0 if workload.lora is not None else 2.0
    operations = _LAYER_OPERATIONS * layers * (_COMPILED if memory.compile else 1.0)
    return _PassCost(
        products=(1.0 + backward) * (forward + (head if is_last else 0.0)),
        memory_bound=moved / device.bandwidth,
        launches=operations * device.launch_s if device.is_cpu else 0.0,
        recompute=again,
    )


_COMPILED_PASSES = 0.5
"""The factor of memory traffic in compiled layers: fused kernels move about half of the bytes."""


def _update_seconds(
    workload: TrainWorkload, strategy: Strategy, device: Accelerator, weights: int, optimizer: int
) -> float:
    """Returns the seconds of clipping and updating: weights, gradients and moments are read, and weights and moments
    are written.
    """
    resident = optimizer if strategy.memory.optimizer == "none" else 0
    moved = 3 * weights + weights + 2 * resident
    count = 9 * workload.model.layers / strategy.layout.pipeline * _UPDATE_OPERATIONS
    factor = 8.0 if workload.optimizer.name in ("muon", "adamw8bit") else 1.0
    return factor * moved / device.bandwidth + (count * device.launch_s if device.is_cpu else 0.0)


def _offload_seconds(
    workload: TrainWorkload, strategy: Strategy, part: Slice, states: StateBytes, layers: int, hidden: float
) -> float:
    """Returns the seconds of copies that computation does not hide.

    During the update no computation hides copies: optimizer state, weights and gradients are read and written. In the
    passes of micro-batches, copies overlap with computation: those of activations, of the weights that each pass reads,
    and of the gradients to which it adds.
    """
    rate = {"none": 0.0, "cpu": 1 / _PCIE, "disk": 1 / _DISK}
    memory = strategy.memory
    count, _ = strategy.microbatches(workload)
    update = 2 * states.optimizer * rate[memory.optimizer]
    update += (2 * states.weights + 2 * states.gradients) * rate[memory.parameters]
    passes = count * (2 * states.weights + 2 * states.gradients) * rate[memory.parameters]
    if memory.activations != "none":
        layer = activations.checkpoint_bytes(workload.model, part, memory)
        passes += 2 * count * layers * layer * rate[memory.activations]
    return update + max(0.0, passes - hidden)


def _bubble_factor(schedule: Schedule) -> float:
    """Returns the share of 1F1B's bubble that remains in a schedule (Qi et al. 2024, arXiv 2401.10241).

    It is a third if the schedule splits the backward pass, and zero if it is V-shaped.
    """
    if schedule in V_SHAPED:
        return 0.0
    return 1.0 / 3.0 if schedule in SPLIT_BACKWARD else 1.0
