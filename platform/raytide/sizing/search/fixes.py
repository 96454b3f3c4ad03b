"""Checks that a training fits the GPUs that its gang requests. If it does not, finds the cheapest change that would
make it fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from raytide.core.errors import CapacityError, ConfigError
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import NodeType, fits, labels_match
from raytide.core.specs.train import TrainSpec
from raytide.sizing.devices import GB, Accelerator, device_of
from raytide.sizing.memory.estimate import Hardware, MemoryEstimate, estimate
from raytide.sizing.model_shape import ModelShape
from raytide.sizing.step_time import step_time
from raytide.sizing.workload import Strategy, TrainWorkload

_LEAST_CONTEXT = 0.5e9
"""The bytes of the smallest CUDA context. A job is refused only if it cannot fit under the most favourable assumptions:
no fragmentation and this context.
"""
_CHUNK = 4096
_MOST_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a spec that saves GPU memory. It may cost time, or memory of the node, or nothing."""

    text: str
    apply: Callable[[TrainWorkload, Strategy], tuple[TrainWorkload, Strategy]]


@dataclass(frozen=True, slots=True)
class Fix:
    """A combination of changes that makes a job fit, with its cost."""

    text: str
    cost: float
    """The dollars of a step relative to those of the unchanged spec, if that had fitted."""

    def describe(self) -> str:
        return f"{self.text} ({self.cost - 1.0:+.0%} cost a step)"


@dataclass(frozen=True)
class Misfit:
    """The reason why a job cannot run on a node type, with the possible fixes."""

    node_type: NodeType
    ranks: int
    needed: MemoryEstimate
    capacity: float
    fixes: tuple[Fix, ...]
    """Cheapest first."""

    @property
    def reason(self) -> str:
        terms = sorted(self.needed.terms.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {nbytes / GB:,.1f}" for name, nbytes in terms)
        return (
            f"{self.needed.peak / GB:,.1f} GB on each of {self.ranks} GPUs ({parts}); "
            f"{self.node_type.name} has {self.capacity / GB:g} GB"
        )


def check_training(spec: TrainSpec, model: ModelShape, shapes: Sequence[Shape], node_types: Sequence[NodeType]) -> None:
    """Raises CapacityError, with the cheapest fix, if the training fits on no node type that its gang's shapes allow.

    A node type whose GPU memory is unknown counts as large enough. A node type without GPUs also counts as large
    enough.
    """
    workload = TrainWorkload.from_spec(spec, model)
    misfits: list[Misfit] = []
    for shape in shapes:
        devices = int(shape.resources.get("GPU", 0.0))
        for node_type in node_types:
            if not _matches(shape, node_type):
                continue
            device = device_of(node_type)
            if not devices or device is None or not device.memory_gb:
                return
            try:
                strategy = smallest(spec, shape.members * devices)
            except ConfigError:  # too few ranks for the layout: another check says so
                return
            found = misfit(workload, strategy, node_type, device, devices, node_types)
            if found is None:
                return
            misfits.append(found)
    if misfits:
        nearest = min(misfits, key=lambda each: each.needed.peak / each.capacity)
        fix = nearest.fixes[0].describe() if nearest.fixes else "Use a smaller model, or GPUs with more memory"
        raise CapacityError(f"{spec.name} cannot fit: it needs at least {nearest.reason}.", hint=f"{fix}.")


def smallest(spec: TrainSpec, world: int) -> Strategy:
    """Returns the spec's strategy with micro-batches of one sequence. The trainer can shrink micro-batches to this
    size.

    Raises ConfigError if the layout needs more than `world` ranks.
    """
    return replace(Strategy.from_spec(spec, world), micro_batch=1)


def misfit(
    workload: TrainWorkload,
    strategy: Strategy,
    node_type: NodeType,
    device: Accelerator,
    devices_per_node: int,
    others: Sequence[NodeType] = (),
) -> Misfit | None:
    """Returns the reason why the strategy cannot fit on the devices. Returns None if it could fit."""
    needed = estimate(workload, strategy, _favourable(device))
    if needed.peak <= device.memory_gb * GB:
        return None
    fixes = _fixes(workload, strategy, node_type, device, devices_per_node, others)
    ordered = sorted(fixes, key=lambda fix: fix.cost)
    return Misfit(node_type, strategy.world, needed, device.memory_gb * GB, tuple(ordered))


def _favourable(device: Accelerator) -> Hardware:
    return Hardware(device.memory_gb * GB, fragmentation=0.0, context_bytes=_LEAST_CONTEXT)


def _fixes(
    workload: TrainWorkload,
    strategy: Strategy,
    node_type: NodeType,
    device: Accelerator,
    devices: int,
    others: Sequence[NodeType],
) -> Iterator[Fix]:
    """Yields fixes that suffice: the smallest combinations of changes to the spec, more nodes, and other node types."""
    base_s = step_time(workload, strategy, device, devices).total
    base_cost = base_s * strategy.world * _price(node_type)
    changes = list(_changes(workload, strategy))
    for count in range(1, _MOST_CHANGES + 1):
        found = list[Fix]()
        for chosen in combinations(changes, count):
            changed = workload, strategy
            for change in chosen:
                changed = change.apply(*changed)
            if estimate(*changed, _favourable(device)).peak <= device.memory_gb * GB:
                seconds = step_time(*changed, device, devices).total
                text = "Set " + " and ".join(change.text for change in chosen)
                found.append(Fix(text, seconds / base_s))
        yield from found
        if found:
            break
    nodes = max(1, strategy.world // devices)
    yield from _larger_members(workload, strategy, node_type, device, devices, base_s)
    for factor in (2, 4, 8):
        wider = _wider(strategy, factor)
        if nodes * factor > node_type.max_nodes or wider.sizes.data > workload.global_batch:
            break
        if estimate(workload, wider, _favourable(device)).peak <= device.memory_gb * GB:
            seconds = step_time(workload, wider, device, devices).total
            cost = seconds * wider.world * _price(node_type)
            yield Fix(f"Ask for {nodes * factor} nodes", cost / base_cost if base_cost else 1.0)
            break
    for other in others:
        able = device_of(other)
        enough = other.resources.get("GPU", 0.0) >= devices and nodes <= other.max_nodes
        if able is None or not enough or able.memory_gb <= device.memory_gb:
            continue
        if estimate(workload, strategy, _favourable(able)).peak <= able.memory_gb * GB:
            seconds = step_time(workload, strategy, able, devices).total
            cost = seconds * strategy.world * _price(other)
            yield Fix(f"Run on {other.name}", cost / base_cost if base_cost else 1.0)


def _larger_members(
    workload: TrainWorkload,
    strategy: Strategy,
    node_type: NodeType,
    device: Accelerator,
    devices: int,
    base_s: float,
) -> Iterator[Fix]:
    """Yields the fix with the fewest GPUs on each node with which the job fits, if the node type has more GPUs than
    requested.
    """
    factor = 2
    while devices * factor <= node_type.resources.get("GPU", 0.0):
        wider = _wider(strategy, factor)
        if wider.sizes.data > workload.global_batch:
            return
        if estimate(workload, wider, _favourable(device)).peak <= device.memory_gb * GB:
            seconds = step_time(workload, wider, device, devices * factor).total
            yield Fix(f"Ask for {devices * factor} GPUs on each node", seconds * factor / base_s)
            return
        factor *= 2


def _changes(workload: TrainWorkload, strategy: Strategy) -> Iterator[Change]:
    memory, layout = strategy.memory, strategy.layout
    for remat in ("selective", "full"):
        if memory.checkpointing != remat and not (remat == "selective" and memory.activations != "none"):
            yield _option("checkpointing", remat)
    if not memory.loss_chunk and layout.tensor == 1:
        yield _option("loss_chunk", _CHUNK)
    if memory.optimizer == "none":
        yield _option("optimizer", "cpu")
    if memory.parameters == "none" and layout.zero == 3 and layout.tensor == layout.pipeline == 1:
        away = {"parameters": "cpu", "optimizer": "cpu"}
        yield Change("memory.parameters cpu", lambda work, how: (work, how.with_memory(**away)))
    if memory.activations == "none" and memory.checkpointing != "selective":
        yield _option("activations", "cpu")
    if layout.zero != 3:
        full = layout.model_copy(update={"zero": 3})
        yield Change("layout.zero 3", lambda work, how: (work, replace(how, layout=full)))
    if workload.precision == "fp32":
        yield Change("precision bf16", lambda work, how: (replace(work, precision="bf16"), how))
    if workload.optimizer.name in ("adamw", "lamb"):
        small = workload.optimizer.model_copy(update={"name": "adamw8bit", "fused": True})
        yield Change("optim.name adamw8bit", lambda work, how: (replace(work, optimizer=small), how))


def _option(name: str, value: str | int) -> Change:
    return Change(f"memory.{name} {value}", lambda work, how: (work, how.with_memory(**{name: value})))


def _wider(strategy: Strategy, factor: int) -> Strategy:
    """Returns the strategy with `factor` times as many ranks that share the weights."""
    return replace(strategy, sizes=replace(strategy.sizes, shard=strategy.sizes.shard * factor))


def _matches(shape: Shape, node_type: NodeType) -> bool:
    if not node_type.max_nodes or not fits(shape.resources, node_type.resources):
        return False
    return any(labels_match(shape.labels, node_type.all_labels(zone)) for zone in node_type.zones)


def _price(node_type: NodeType) -> float:
    """Returns the price of one GPU of the node type, in micro-dollars an hour."""
    return node_type.price_micro_usd_h / max(1.0, node_type.resources.get("GPU", 1.0))
