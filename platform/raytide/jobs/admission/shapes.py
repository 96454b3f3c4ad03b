"""Which of its shapes a job had better have: the one in which its work costs least. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import dominant_share
from raytide.core.objects.snapshot import Throughputs
from raytide.scheduling.offerings import Offerings
from raytide.scheduling.throughput import cost_per_work


def cheapest_first(shapes: Sequence[Shape], market: Offerings, paces: Throughputs) -> Sequence[Shape]:
    """As the job prefers them where their work costs the same, and while nobody knows that node types differ."""
    if len(shapes) < 2 or not paces:
        return shapes
    return sorted(shapes, key=lambda shape: _cost(shape, market, paces))


def _cost(shape: Shape, market: Offerings, paces: Throughputs) -> float:
    """Of what one of its GPUs does in an hour where that is slowest; the losses of spot included."""
    names = [(offer, offer.node_type.name) for offer, _ in market.offerings_for(shape)]
    costs = [
        cost_per_work(offer.cost_micro_usd_h * dominant_share(shape.resources, offer.node_type.resources), name, paces)
        for offer, name in names
    ]
    return float(f"{min(costs, default=float('inf')) / shape.gpus:.4g}") if shape.gpus else 0.0
