"""The tables of docs/metrics.md: `python -m raytide.core.telemetry.reference` prints them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from raytide.core.telemetry.catalogue import LAYERS
from raytide.core.telemetry.metrics import Layer, Metric


def tables() -> str:
    """Returns Markdown tables of all metrics, one table for each layer."""
    return "\n".join(line for layer in LAYERS for line in _table(layer))


def _table(layer: Layer) -> Iterator[str]:
    yield f"### {layer.capitalize()}"
    yield ""
    yield "| metric | type | unit | labels | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    yield from map(_row, LAYERS[layer])
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.exposed_name}` | {metric.type} | {metric.unit} | {labels} | {metric.help} |"


if __name__ == "__main__":
    sys.stdout.write(tables())
