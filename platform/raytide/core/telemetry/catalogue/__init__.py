"""Every metric that raytide exposes: a module or two for each layer, and all of them in `METRICS`."""

from __future__ import annotations

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
    training,
)
from raytide.core.telemetry.metrics import Metric


def declared_in(module: ModuleType) -> tuple[Metric, ...]:
    """Returns the metrics that a module declares, in its order."""
    return tuple(value for value in vars(module).values() if isinstance(value, Metric))


CATALOGUE: tuple[Metric, ...] = tuple(
    metric
    for module in (client, application, model, infrastructure, training, queue, cost, control, monitoring)
    for metric in declared_in(module)
)
"""raytide's own metrics."""

METRICS: dict[str, Metric] = {metric.name: metric for metric in (*CATALOGUE, *declared_in(gpu))}
"""The catalogue and DCGM's metrics, by declared name."""
