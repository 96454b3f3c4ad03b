"""How fast the work of a job or an endpoint goes on each type of node, and so what it costs: dollars for work, not for
hours. Pure.

Types with the same accelerator are of one kind, whatever their market, and do alike. What was measured on a kind
counts; on others the `speed` of their types says how they compare with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean

from raytide.core.objects.node import ACCELERATOR_LABEL, NodeType, Resources
from raytide.core.objects.snapshot import Throughputs

MOST_PACE = 100.0
"""No kind is taken to do more than so many times what the slowest does: speeds are also what users say."""


@dataclass(frozen=True, slots=True)
class AcceleratorClasses:
    """Of the node types on which some work could go."""

    types: Mapping[str, str] = field(default_factory=dict)
    """The kind of each."""
    declared: Mapping[str, float] = field(default_factory=dict)
    """The `speed` of each kind."""

    @classmethod
    def of(cls, node_types: Iterable[NodeType], need: Resources) -> AcceleratorClasses:
        """`need`: what the work asks of a node. The `speed` of a type with GPUs is for work on these."""
        by_kind: dict[str, list[NodeType]] = defaultdict(list)
        for node_type in node_types:
            by_kind[_kind_of(node_type)].append(node_type)
        return cls(
            types={node_type.name: kind for kind, types in by_kind.items() for node_type in types},
            declared={kind: fmean(_said(node_type, need) for node_type in types) for kind, types in by_kind.items()},
        )

    def paces(self, measured: Mapping[str, float]) -> Throughputs:
        """`measured`: what is done on node types, in any unit."""
        found: dict[str, list[float]] = defaultdict(list)
        for name, rate in measured.items():
            if (kind := self.types.get(name)) is not None:
                found[kind].append(rate)
        seen = {kind: fmean(rates) for kind, rates in found.items()}
        scale = geometric_mean(rate / self.declared[kind] for kind, rate in seen.items()) if seen else 1.0
        rates = {kind: seen.get(kind, scale * said) for kind, said in self.declared.items()}
        least = min(rates.values(), default=1.0)
        relative = {kind: min(round(rate / least, 1), MOST_PACE) for kind, rate in rates.items()}
        return {name: relative[kind] for name, kind in self.types.items()} if {*relative.values()} - {1.0} else {}


def cost_per_work(cost: float, node_type: str, paces: Throughputs) -> float:
    """What a unit of work costs there, when an hour costs so much."""
    return cost / paces.get(node_type, 1.0)


def no_slower(node_type: str, paces: Throughputs) -> str:
    """A label selector's value for the node types on which work goes as fast as on this one, or faster; empty: all."""
    least = paces.get(node_type, 1.0)
    return f"in({','.join(sorted(name for name, pace in paces.items() if pace >= least))})" if paces else ""


def _kind_of(node_type: NodeType) -> str:
    """The accelerator's name; of types that name none, what their nodes hold."""
    held = " ".join(f"{name} {amount:g}" for name, amount in sorted(node_type.resources.items()))
    return node_type.labels.get(ACCELERATOR_LABEL) or held


def _said(node_type: NodeType, need: Resources) -> float:
    is_of_gpus = bool(node_type.resources.get("GPU"))
    return node_type.speed if is_of_gpus == bool(need.get("GPU")) else 1.0
