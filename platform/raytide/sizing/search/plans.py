"""Ranks the plans for one training. A plan is for one node type. It consists of a layout and memory options, and
predicts the training's time, dollars and energy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from raytide.core.money import MICRO
from raytide.core.objects.node import NodeType
from raytide.core.specs.parallelism import Parallelism, Sizes
from raytide.core.specs.train import MemorySpec, Remat
from raytide.sizing.calibration import Corrections
from raytide.sizing.devices import GB, Accelerator, device_of
from raytide.sizing.memory.estimate import Hardware, MemoryEstimate, estimate
from raytide.sizing.step_time import StepTime, step_time
from raytide.sizing.workload import Strategy, TrainWorkload

Objective = Literal["cost", "time"]
WATTS_PER_CORE = 3.5
"""The power of a busy core in watts: the Cloud Carbon Footprint project's mean for AWS (2022), as in
`metadata.raytide.energy`.
"""
_TIGHT = 0.85
"""The share of a device's memory above which memory counts as the binding constraint."""
_REMATS: tuple[Remat, ...] = ("none", "selective", "full")
_LONG_SEQUENCE = 16_384
"""The sequence length below which context parallelism never pays, because a sequence's activations fit."""
_MOST_PIPELINE, _MOST_CONTEXT = 16, 8
_LOSS_CHUNK = 4096
_LARGE_VOCABULARY = 16_384
_MICRO_BATCHES = (32, 16, 8, 4, 2, 1)


def layouts(workload: TrainWorkload, world: int, devices_per_node: int) -> Iterator[tuple[Sizes, Parallelism]]:
    """Yields the meshes of exactly `world` ranks that the trainer accepts for this model.

    The tensor axis stays within a node. A model that is sharded over several nodes may also be replicated.
    """
    contexts = _powers(_MOST_CONTEXT) if workload.seq_len >= _LONG_SEQUENCE else [1]
    for tensor, pipeline, context in product(_powers(devices_per_node), _powers(_MOST_PIPELINE), contexts):
        rest, odd = divmod(world, tensor * pipeline * context)
        if odd or not is_possible(workload, tensor, pipeline, context):
            continue
        for replicate in {1, max(1, rest * tensor * pipeline * context // devices_per_node), rest}:
            if rest % replicate or rest > workload.global_batch:
                continue
            for zero in _zeros(pipeline, rest // replicate * context):
                layout = Parallelism(
                    replicate=replicate,
                    shard=rest // replicate,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    zero=zero,
                )
                if math.ceil(workload.global_batch / rest) >= layout.min_microbatches:
                    yield layout.sizes(world), layout


def is_possible(workload: TrainWorkload, tensor: int, pipeline: int, context: int) -> bool:
    """Returns whether the trainer accepts these sizes of mesh axes, by the rules of
    actors/trainer/parallel/validate.py.
    """
    model = workload.model
    pieces = tensor if context == 1 else math.lcm(2 * context, context * tensor)
    if workload.seq_len % pieces or model.layers < pipeline:
        return False
    if tensor == 1:
        return True
    has_dense = len(model.sparse_layers) < model.layers
    divides = model.heads % tensor == 0 and (not has_dense or model.ffn % tensor == 0)
    divides = divides and (not model.experts or model.expert_ffn % tensor == 0)
    shares = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return divides and shares and workload.precision != "fp8"


def memory_options(workload: TrainWorkload, layout: Parallelism, base: MemorySpec) -> Iterator[MemorySpec]:
    """Yields the memory options to try for a layout: each kind of checkpointing, with whole and with chunked logits."""
    chunks = [base.loss_chunk]
    if not base.loss_chunk and layout.tensor == 1 and workload.model.vocab >= _LARGE_VOCABULARY:
        chunks.append(_LOSS_CHUNK)
    for remat, chunk in product(_REMATS, chunks):
        if remat == "selective" and base.activations != "none":
            continue
        yield base.model_copy(update={"checkpointing": remat, "loss_chunk": chunk})


def micro_batches(workload: TrainWorkload, sizes: Sizes) -> list[int]:
    """Returns the micro-batch sizes to try, in sequences, the largest first. No size exceeds a data rank's share of a
    step.
    """
    rows = math.ceil(workload.global_batch / sizes.data)
    return [size for size in _MICRO_BATCHES if size <= rows]


def world_sizes(devices_per_node: int, most_nodes: int) -> list[tuple[int, int]]:
    """Returns the cluster sizes to try, as pairs (number of nodes, total number of devices). First come 1, 2, 4...
    devices of one node, then 1, 2, 4... whole nodes and at last all nodes.
    """
    parts = [(1, size) for size in _powers(devices_per_node) if size < devices_per_node]
    counts = sorted({*_powers(most_nodes), most_nodes} - {0})
    return parts + [(nodes, nodes * devices_per_node) for nodes in counts]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _zeros(pipeline: int, ranks: int) -> tuple[Literal[1, 2, 3], ...]:
    """Returns the ZeRO stages worth trying. A pipeline has no stage 2, and one rank has nothing to shard."""
    if ranks == 1:
        return (3,)
    return (1, 3) if pipeline > 1 else (2, 3)


@dataclass(frozen=True)
class TrainingPlan:
    """One way to run a training, with its memory, time and cost."""

    node_type: NodeType
    nodes: int
    devices: int
    """The number of ranks on each node."""
    device: Accelerator
    workload: TrainWorkload
    strategy: Strategy
    memory: MemoryEstimate
    step: StepTime
    watts_per_core: float = WATTS_PER_CORE

    @property
    def hours(self) -> float:
        return self.step.total * self.workload.steps / 3600.0

    @property
    def node_share(self) -> float:
        """The fraction of a node's GPUs that the plan uses. It is 1 for nodes without GPUs."""
        whole = self.node_type.resources.get("GPU") or self.devices
        return self.devices / whole

    @property
    def usd_per_h(self) -> float:
        return self.nodes * self.node_share * self.node_type.price_micro_usd_h / MICRO

    @property
    def usd(self) -> float:
        return self.hours * self.usd_per_h

    @property
    def kwh(self) -> float:
        """The energy of the whole run in kWh: the energy of the devices at their board power, and that of the plan's
        share of the CPU cores.
        """
        cores = self.node_type.resources.get("CPU", 0.0) * self.node_share
        watts = self.nodes * (self.devices * self.device.watts + cores * self.watts_per_core)
        return watts * self.hours / 1000.0

    @property
    def memory_share(self) -> float:
        """The share of a device's memory that the plan needs. It is 0 if the device's memory is unknown."""
        capacity = self.device.memory_gb * GB
        return self.memory.peak / capacity if capacity else 0.0

    @property
    def binding(self) -> str:
        """The constraint that limits the plan's speed."""
        if self.memory_share > _TIGHT:
            return f"memory ({self.memory.largest_term})"
        waste = self.step.largest_waste
        return "compute" if waste == "kernels below peak" else waste

    @property
    def layout_text(self) -> str:
        memory, layout = self.strategy.memory, self.strategy.layout
        parts = [str(self.strategy.sizes), f"zero {layout.zero}", f"micro-batch {self.strategy.micro_batch}"]
        if memory.checkpointing != "none":
            parts.append(f"{memory.checkpointing} checkpointing")
        if memory.loss_chunk:
            parts.append(f"loss in chunks of {memory.loss_chunk}")
        parts += [f"{what} on {place}" for what, place in _offloaded(memory).items()]
        return ", ".join(parts)

    def json(self) -> dict[str, object]:
        """Returns the plan as plain values, with units in the field names."""
        return {
            "node_type": self.node_type.name,
            "nodes": self.nodes,
            "devices_per_node": self.devices,
            "layout": self.strategy.layout.model_dump(mode="json"),
            "micro_batch": self.strategy.microbatches(self.workload)[1],
            "memory": self.strategy.memory.model_dump(mode="json", exclude_defaults=True),
            "peak_bytes": round(self.memory.peak),
            "memory_share": round(self.memory_share, 4),
            "bytes": {name: round(nbytes) for name, nbytes in self.memory.terms.items()},
            "host_bytes": round(self.memory.host),
            "step_s": self.step.total,
            "step_parts_s": dict(self.step.parts),
            "tokens_per_s": self.step.tokens_per_s,
            "mfu": self.step.mfu,
            "hours": self.hours,
            "usd": self.usd,
            "kwh": self.kwh,
            "binding": self.binding,
        }


@dataclass(frozen=True)
class PlanSearch:
    """The result of a search: `plans` has the plans that fit, the best first. For each node type on which no plan fits,
    `misses` has the plan that is closest to fitting.
    """

    plans: tuple[TrainingPlan, ...]
    misses: tuple[TrainingPlan, ...]
    unknown: tuple[str, ...] = ()
    """The node types whose GPUs are not known, for which nothing can be predicted."""
    considered: int = 0


def _accept_any(layout: Parallelism, memory: MemorySpec) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """The options of a search for plans: its objective, limits and corrections."""

    objective: Objective = "cost"
    most_nodes: int = 64
    base: MemorySpec = field(default_factory=MemorySpec)
    """The memory options that the search does not change: offloading and compilation."""
    corrections: Corrections = field(default_factory=Corrections)
    watts_per_core: float = WATTS_PER_CORE
    hours: float | None = None
    """The longest that the run should take; None for any time. Plans that take longer are ranked after all others."""
    accepts: Callable[[Parallelism, MemorySpec], bool] = _accept_any
    """Returns whether the run may have this layout together with these memory options."""


def search_plans(
    workload: TrainWorkload, node_types: Sequence[NodeType], options: SearchOptions | None = None
) -> PlanSearch:
    """Returns the best plan for each node type and number of devices, ranked by the objective.

    CPUs are considered only if no node type has known GPUs. Each CPU node is one rank.
    """
    options = options or SearchOptions()
    fitting: list[TrainingPlan] = []
    misses: list[TrainingPlan] = []
    unknown: list[str] = []
    considered = 0
    devices = {node_type.name: device_of(node_type) for node_type in node_types if node_type.max_nodes}
    has_gpus = any(device is not None and not device.is_cpu for device in devices.values())
    for node_type in node_types:
        device = devices.get(node_type.name)
        if device is None and node_type.max_nodes:
            unknown.append(node_type.name)
        if device is None or (device.is_cpu and has_gpus):
            continue
        device = options.corrections.apply(device)
        nearest: TrainingPlan | None = None
        count = max(1, int(node_type.resources.get("GPU", 1.0)))
        found = 0
        for nodes, world in world_sizes(count, min(node_type.max_nodes, options.most_nodes)):
            plans = list(plans_on(workload, node_type, device, nodes, world // nodes, options))
            considered += len(plans)
            able = [plan for plan in plans if plan.memory_share <= 1.0]
            found += len(able)
            if able:
                fitting.append(min(able, key=lambda plan: _rank(plan, options)))
            elif plans:
                closest = min(plans, key=lambda plan: plan.memory.peak)
                nearest = closest if nearest is None or closest.memory.peak < nearest.memory.peak else nearest
        if not found and nearest is not None:
            misses.append(nearest)
    fitting.sort(key=lambda plan: _rank(plan, options))
    return PlanSearch(tuple(fitting), tuple(misses), tuple(unknown), considered)


def plans_on(
    workload: TrainWorkload,
    node_type: NodeType,
    device: Accelerator,
    nodes: int,
    devices: int,
    options: SearchOptions,
) -> Iterable[TrainingPlan]:
    """Yields one plan for each layout and each choice of memory options. The plan has the largest micro-batch that
    fits. If no micro-batch fits, the plan has the smallest micro-batch.
    """
    hardware = hardware_of(device)
    for sizes, layout in layouts(workload, nodes * devices, devices):
        for memory in memory_options(workload, layout, options.base):
            if not options.accepts(layout, memory):
                continue
            for size in micro_batches(workload, sizes):
                strategy = Strategy(sizes, layout, size, memory)
                needed = estimate(workload, strategy, hardware)
                if hardware.bytes and needed.peak > hardware.bytes and size > 1:
                    continue
                step = step_time(workload, strategy, device, devices)
                yield TrainingPlan(
                    node_type, nodes, devices, device, workload, strategy, needed, step, options.watts_per_core
                )
                break


def hardware_of(device: Accelerator) -> Hardware:
    """Returns those properties of the device that the memory estimate needs."""
    if device.is_cpu:
        return Hardware.cpu(device.memory_gb * GB)
    return Hardware(device.memory_gb * GB, activation_scale=device.memory_scale)


def _rank(plan: TrainingPlan, options: SearchOptions) -> tuple[bool, float, float]:
    is_late = options.hours is not None and plan.hours > options.hours
    first, second = (plan.usd, plan.hours) if options.objective == "cost" else (plan.hours, plan.usd)
    return is_late, plan.hours if is_late else first, second


def _offloaded(memory: MemorySpec) -> Mapping[str, str]:
    places = {"optimizer": memory.optimizer, "parameters": memory.parameters, "activations": memory.activations}
    return {what: place for what, place in places.items() if place != "none"}
