"""The catalogue of every metric that raytide exposes. One or more modules declare the metrics of each layer. `METRICS`
contains the metrics of all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from raytide.core.telemetry.catalogue import (
    application,
    client,
    control,
    cost,
    gpu,
    infrastructure,
    model,
    monitoring,
    queue,
    ray,
    training,
)
from raytide.core.telemetry.metrics import Layer, Metric


def declared_in(module: ModuleType) -> tuple[Metric, ...]:
    """Returns the metrics that a module declares, in the order of their declaration."""
    return tuple(value for value in vars(module).values() if isinstance(value, Metric))


LAYERS: Mapping[Layer, tuple[Metric, ...]] = {
    "client": declared_in(client),
    "application": declared_in(application),
    "model": declared_in(model),
    "infrastructure": (*declared_in(infrastructure), *declared_in(control), *declared_in(gpu), *declared_in(ray)),
    "training": declared_in(training),
    "queue": declared_in(queue),
    "cost": declared_in(cost),
    "monitoring": declared_in(monitoring),
}
"""The metrics that each layer exposes: raytide's own, DCGM's of nodes with GPUs, and a few of Ray's."""

METRICS: dict[str, Metric] = {metric.name: metric for metrics in LAYERS.values() for metric in metrics}
"""All metrics, by declared name."""
