"""Metrics of the monitor: probes, alerts, actions, anomalies, and whether it can scrape."""

from raytide.core.telemetry.catalogue.buckets import REQUEST_S
from raytide.core.telemetry.metrics import Metric

_PROBE = ("endpoint", "probe")

PROBE_SUCCESS = Metric(
    "raytide_probe_success", "gauge", "1 if the last probe was answered", "monitoring", labels=_PROBE
)
PROBE_ANSWER_RIGHT = Metric(
    "raytide_probe_answer_right", "gauge", "1 if the last answer was the expected one", "monitoring", labels=_PROBE
)
PROBE_SECONDS = Metric(
    "raytide_probe_seconds",
    "histogram",
    "Time from a probe to the end of its answer",
    "monitoring",
    "seconds",
    _PROBE,
    REQUEST_S,
)
ALERTS = Metric("raytide_alerts", "gauge", "Alerts that fire now", "monitoring", labels=("alert", "severity"))
ACTIONS = Metric(
    "raytide_actions",
    "counter",
    "Actions that alerts caused, by how they ended",
    "monitoring",
    labels=("action", "outcome"),
)
ANOMALY_SCORE = Metric(
    "raytide_anomaly_score",
    "gauge",
    "Robust z-score of a signal's last value",
    "monitoring",
    labels=("signal", "subject"),
)
SCRAPE_UP = Metric(
    "raytide_scrape_up", "gauge", "1 if the last scrape of a target succeeded", "monitoring", labels=("job", "instance")
)
