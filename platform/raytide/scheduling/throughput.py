"""The relative throughput of a job or an endpoint on each node type, and the cost per unit of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean

from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType, Resources
from raytide.core.objects.snapshot import Throughputs

MOST_PACE = 100.0
"""The largest ratio of throughputs between accelerator classes, because users may also declare speeds."""


@dataclass(frozen=True, slots=True)
class AcceleratorClasses:
    """The accelerator classes of the node types that a job or an endpoint could use."""

    types: Mapping[str, str] = field(default_factory=dict)
    """The class of each node type."""
    declared: Mapping[str, float] = field(default_factory=dict)
    """The declared `speed` of each class."""

    @classmethod
    def of(cls, node_types: Iterable[NodeType], need: Resources) -> AcceleratorClasses:
        """Returns the accelerator classes of these node types.

        `need` is the resources of one member. The declared `speed` of a node type with GPUs applies only to members
        that use GPUs.
        """
        by_class: dict[str, list[NodeType]] = defaultdict(list)
        for node_type in node_types:
            by_class[_class_of(node_type)].append(node_type)
        return cls(
            types={node_type.name: class_ for class_, types in by_class.items() for node_type in types},
            declared={
                class_: fmean(_declared_speed(node_type, need) for node_type in types)
                for class_, types in by_class.items()
            },
        )

    def relative(self, measured: Mapping[str, float]) -> Throughputs:
        """Returns the throughput on each node type, relative to the slowest node type.

        `measured` is the measured throughput by node type, in any unit.
        """
        found: dict[str, list[float]] = defaultdict(list)
        for name, rate in measured.items():
            if (class_ := self.types.get(name)) is not None:
                found[class_].append(rate)
        known = {class_: fmean(rates) for class_, rates in found.items()}
        scale = geometric_mean(rate / self.declared[class_] for class_, rate in known.items()) if known else 1.0
        rates = {class_: known.get(class_, scale * speed) for class_, speed in self.declared.items()}
        least = min(rates.values(), default=1.0)
        relative = {class_: min(round(rate / least, 1), MOST_PACE) for class_, rate in rates.items()}
        return {name: relative[class_] for name, class_ in self.types.items()} if {*relative.values()} - {1.0} else {}


def cost_per_work(cost: float, node_type: str, paces: Throughputs) -> float:
    """Returns the cost of a unit of work on a node of this type. `cost` is the cost of an hour."""
    return cost / paces.get(node_type, 1.0)


def at_least_as_fast_as(node_type: str, paces: Throughputs) -> str:
    """Returns the value of a label selector for all node types that are at least as fast as `node_type`.

    `paces` has the relative throughput of each node type. It is empty if all types are equally fast. The value is then
    empty too, and selects all types.
    """
    least = paces.get(node_type, 1.0)
    return f"in({','.join(sorted(name for name, pace in paces.items() if pace >= least))})" if paces else ""


def _class_of(node_type: NodeType) -> str:
    """Returns the accelerator's name; for types without one, a description of their resources."""
    held = " ".join(f"{name} {amount:g}" for name, amount in sorted(node_type.resources.items()))
    return node_type.labels.get(ACCELERATOR_LABEL) or held


def _declared_speed(node_type: NodeType, need: Resources) -> float:
    has_gpus = bool(node_type.resources.get("GPU"))
    return node_type.speed if has_gpus == bool(need.get("GPU")) else 1.0
