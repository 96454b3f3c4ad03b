"""Metrics of the control plane itself."""

from typing import Final

from raytide.core.telemetry.metrics import Metric

_LAYER: Final = "infrastructure"

TICKS = Metric("raytide_controller_ticks", "counter", "Ticks of the controller", _LAYER)
TICK_SECONDS = Metric("raytide_controller_tick_seconds", "gauge", "Duration of the last tick", _LAYER, "seconds")
QUARANTINED = Metric(
    "raytide_quarantined", "gauge", "Records excluded from decisions after an error, by kind", _LAYER, labels=("kind",)
)
ERRORS = Metric("raytide_controller_errors", "counter", "Failed calls to Ray or to the provider", _LAYER)
TROUBLE = Metric(
    "raytide_trouble",
    "gauge",
    "1 while the disk is full, the store refuses writes, or the controller is stalled",
    _LAYER,
    labels=("what",),
)
