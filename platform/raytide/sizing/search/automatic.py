"""Fills in `layout: auto` and `gang: auto` of a training's spec when the job is submitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pydantic import ValidationError

from raytide.core.errors import CapacityError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.node import TYPE_LABEL, NodeType, fits, labels_match
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import MemorySpec, TrainSpec
from raytide.sizing.calibration import Corrections
from raytide.sizing.devices import GB, device_of
from raytide.sizing.memory.estimate import estimate
from raytide.sizing.model_shape import ModelShape
from raytide.sizing.search.fixes import misfit
from raytide.sizing.search.plans import SearchOptions, TrainingPlan, hardware_of, plans_on, search_plans
from raytide.sizing.workload import Strategy, TrainWorkload

_MOST_SHAPES = 4


def fill_in(
    spec: TrainSpec, model: ModelShape, node_types: Sequence[NodeType], corrections: Corrections | None = None
) -> TrainSpec:
    """Returns the spec with its automatic fields filled in from the best plan. The best plan for an automatic gang is
    the cheapest one. The best plan for a given gang is the fastest one.

    An automatic gang lists the node types on which the plan's layout fits, the cheapest first. If the layout does
    not replicate the model, the gang is elastic. Its minimum is then the fewest nodes on which the layout still
    fits. Raises CapacityError, with the cheapest fix, if no plan fits.
    """
    if not spec.auto:
        return spec
    workload = TrainWorkload.from_spec(spec, model)
    options = SearchOptions(base=spec.memory, corrections=corrections or Corrections())
    if "layout" in spec.auto:
        options = replace(options, accepts=_acceptor(spec))
    plan = _best(spec, workload, node_types, options)
    found = _with_strategy(spec, plan.strategy)
    if "gang" in spec.auto:
        shapes = [shape for each in _same_layout(plan, workload, node_types, options) if (shape := _shape(each, spec))]
        found = found.model_copy(update={"gang": GangSpec(shapes=tuple(shapes[:_MOST_SHAPES]))})
    return found.model_copy(update={"auto": ()})


def _acceptor(spec: TrainSpec) -> Callable[[Parallelism, MemorySpec], bool]:
    """Returns a function that says whether the spec is valid with a layout and memory options."""
    fields = spec.model_dump(mode="json", exclude={"auto", "layout", "memory"})

    def accepts(layout: Parallelism, memory: MemorySpec) -> bool:
        try:
            TrainSpec.model_validate({**fields, "layout": layout.model_dump(), "memory": memory.model_dump()})
        except ValidationError:
            return False
        return True

    return accepts


def _best(
    spec: TrainSpec, workload: TrainWorkload, node_types: Sequence[NodeType], options: SearchOptions
) -> TrainingPlan:
    if "gang" in spec.auto:
        found = search_plans(workload, node_types, options)
        if found.plans:
            return found.plans[0] if "layout" in spec.auto else _fixed(spec, found.plans, options)
        nearest = min(found.misses, key=lambda each: each.memory_share, default=None)
        raise _nothing_fits(spec, nearest, node_types)
    shape = spec.gang.shapes[0]
    devices = max(1, int(shape.resources.get("GPU", 0.0)))
    tried: list[TrainingPlan] = []
    for node_type in node_types:
        device = device_of(node_type)
        labelled = any(labels_match(shape.labels, node_type.all_labels(zone)) for zone in node_type.zones)
        if device is None or not labelled or not fits(shape.resources, node_type.resources):
            continue
        tried += plans_on(workload, node_type, options.corrections.apply(device), shape.members, devices, options)
    able = [plan for plan in tried if plan.memory_share <= 1.0]
    if able:
        return min(able, key=lambda plan: plan.hours)
    raise _nothing_fits(spec, min(tried, key=lambda each: each.memory_share, default=None), node_types)


def _fixed(spec: TrainSpec, plans: Sequence[TrainingPlan], options: SearchOptions) -> TrainingPlan:
    """Returns the best plan with the layout that the spec gives."""
    for plan in plans:
        world = plan.nodes * plan.devices
        fixed = spec.layout
        if fixed.replicate * fixed.tensor * fixed.pipeline * fixed.context * (fixed.shard or 1) > world:
            continue
        strategy = Strategy.from_spec(spec, world)
        needed = estimate(plan.workload, replace(strategy, micro_batch=1), hardware_of(plan.device))
        if strategy.world == world and needed.peak <= plan.device.memory_gb * GB:
            return replace(plan, strategy=strategy, memory=needed)
    raise CapacityError(f"no node type fits {spec.name} with its layout.", hint="Set layout: auto too, or give a gang.")


def _with_strategy(spec: TrainSpec, strategy: Strategy) -> TrainSpec:
    """Returns the spec with the strategy's layout, micro-batch and memory options, if its layout is automatic."""
    if "layout" not in spec.auto:
        return spec
    layout = strategy.layout
    elastic = layout.model_copy(update={"shard": None}) if layout.replicate == 1 else layout
    memory: MemorySpec = strategy.memory
    return spec.model_copy(update={"layout": elastic, "micro_batch": strategy.micro_batch, "memory": memory})


def _same_layout(
    best: TrainingPlan, workload: TrainWorkload, node_types: Sequence[NodeType], options: SearchOptions
) -> list[TrainingPlan]:
    """Returns the plans, best first, that have the layout and memory options of the best plan, on any node type."""
    found = [best]
    for node_type in node_types:
        device = device_of(node_type)
        if device is None or node_type.name == best.node_type.name or device.is_cpu != best.device.is_cpu:
            continue
        device = options.corrections.apply(device)
        for devices, nodes in ((best.devices, best.nodes), (best.devices, 2 * best.nodes)):
            if nodes > node_type.max_nodes or devices > max(1.0, node_type.resources.get("GPU", 0.0)):
                continue
            able = [
                plan
                for plan in plans_on(workload, node_type, device, nodes, devices, options)
                if plan.memory_share <= 1.0 and _axes(plan.strategy) == _axes(best.strategy)
            ]
            if able:
                found.append(min(able, key=lambda plan: plan.usd))
                break
    return [best, *sorted(found[1:], key=lambda plan: plan.usd)]


def _axes(strategy: Strategy) -> tuple[Parallelism, MemorySpec, int]:
    layout = strategy.layout
    elastic = layout.model_copy(update={"shard": None}) if layout.replicate == 1 else layout
    return elastic, strategy.memory, strategy.micro_batch


def _shape(plan: TrainingPlan, spec: TrainSpec) -> Shape:
    """Returns the shape of a plan, with the fewest nodes that still fit as its minimum."""
    strategy, layout = plan.strategy, plan.strategy.layout
    least = plan.nodes
    if layout.replicate == 1:
        for nodes in range(1, plan.nodes):
            rest, odd = divmod(nodes * plan.devices, layout.tensor * layout.pipeline * layout.context)
            if odd or not rest:
                continue
            smaller = replace(strategy, sizes=replace(strategy.sizes, shard=rest), micro_batch=1)
            if estimate(plan.workload, smaller, hardware_of(plan.device)).peak <= plan.device.memory_gb * GB:
                least = nodes
                break
    gpus = plan.node_type.resources.get("GPU")
    resources = {"GPU": float(plan.devices)} if gpus else {"CPU": plan.node_type.resources.get("CPU", 1.0)}
    labels = {TYPE_LABEL: plan.node_type.name}
    return Shape(members=plan.nodes, min_members=least, resources=resources, labels=labels)


def _nothing_fits(spec: TrainSpec, nearest: TrainingPlan | None, node_types: Sequence[NodeType]) -> CapacityError:
    if nearest is None:
        return CapacityError(
            f"no node type is known on which {spec.name} could be planned.",
            hint="Give a gang and a layout, or label node types with a known ray.io/accelerator-type.",
        )
    found = misfit(
        nearest.workload,
        replace(nearest.strategy, micro_batch=1),
        nearest.node_type,
        nearest.device,
        nearest.devices,
        node_types,
    )
    fix = "Use a smaller model, or GPUs with more memory"
    if found is not None and found.fixes:
        fix = found.fixes[0].describe()
    needed = f"{nearest.memory.peak / GB:,.1f} GB on each of {nearest.nodes} x {nearest.devices} GPUs"
    has = f"{nearest.node_type.name} has {nearest.device.memory_gb:g} GB"
    return CapacityError(f"no plan fits {spec.name}: the nearest needs {needed}; {has}.", hint=f"{fix}.")
