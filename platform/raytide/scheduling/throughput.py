"""The relative throughput of a job or an endpoint on each node type, and costs per unit of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean

from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType, Resources
from raytide.core.objects.snapshot import Throughputs

MOST_PACE = 100.0
"""The largest ratio between accelerator classes: speeds may also be declared by users."""


@dataclass(frozen=True, slots=True)
class AcceleratorClasses:
    """The accelerator classes of the node types that some work could use."""

    types: Mapping[str, str] = field(default_factory=dict)
    """The class of each node type."""
    declared: Mapping[str, float] = field(default_factory=dict)
    """The declared `speed` of each class."""

    @classmethod
    def of(cls, node_types: Iterable[NodeType], need: Resources) -> AcceleratorClasses:
        """`need`: a member's resources. The `speed` of a type with GPUs applies to work on GPUs only."""
        by_kind: dict[str, list[NodeType]] = defaultdict(list)
        for node_type in node_types:
            by_kind[_kind_of(node_type)].append(node_type)
        return cls(
            types={node_type.name: kind for kind, types in by_kind.items() for node_type in types},
            declared={kind: fmean(_said(node_type, need) for node_type in types) for kind, types in by_kind.items()},
        )

    def relative(self, measured: Mapping[str, float]) -> Throughputs:
        """The throughput on each node type relative to the slowest. `measured`: throughput on node types, in any
        unit."""
        found: dict[str, list[float]] = defaultdict(list)
        for name, rate in measured.items():
            if (kind := self.types.get(name)) is not None:
                found[kind].append(rate)
        seen = {kind: fmean(rates) for kind, rates in found.items()}
        scale = geometric_mean(rate / self.declared[kind] for kind, rate in seen.items()) if seen else 1.0
        rates = {kind: seen.get(kind, scale * speed) for kind, speed in self.declared.items()}
        least = min(rates.values(), default=1.0)
        relative = {kind: min(round(rate / least, 1), MOST_PACE) for kind, rate in rates.items()}
        return {name: relative[kind] for name, kind in self.types.items()} if {*relative.values()} - {1.0} else {}


def cost_per_work(cost: float, node_type: str, paces: Throughputs) -> float:
    """The cost of a unit of work on this type, given the cost of an hour."""
    return cost / paces.get(node_type, 1.0)


def at_least_as_fast_as(node_type: str, paces: Throughputs) -> str:
    """A label selector's value for the node types that are at least as fast as this one; empty for all."""
    least = paces.get(node_type, 1.0)
    return f"in({','.join(sorted(name for name, pace in paces.items() if pace >= least))})" if paces else ""


def _kind_of(node_type: NodeType) -> str:
    """The accelerator's name; for types without one, a description of their resources."""
    held = " ".join(f"{name} {amount:g}" for name, amount in sorted(node_type.resources.items()))
    return node_type.labels.get(ACCELERATOR_LABEL) or held


def _said(node_type: NodeType, need: Resources) -> float:
    is_of_gpus = bool(node_type.resources.get("GPU"))
    return node_type.speed if is_of_gpus == bool(need.get("GPU")) else 1.0
