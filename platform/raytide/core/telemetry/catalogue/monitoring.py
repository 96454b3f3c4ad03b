"""Metrics of the monitor: probes, alerts, actions, anomalies, and the success of scrapes."""

from raytide.core.telemetry.catalogue.buckets import REQUEST_S
from raytide.core.telemetry.metrics import counter, gauge, histogram

_PROBE = ("endpoint", "probe")

PROBE_SUCCESS = gauge("raytide_probe_success", "1 if the last probe was answered", *_PROBE)
PROBE_ANSWER_RIGHT = gauge("raytide_probe_answer_right", "1 if the last answer was the expected one", *_PROBE)
PROBE_SECONDS = histogram("raytide_probe_seconds", "Time from a probe to the end of its answer", REQUEST_S, *_PROBE)
ALERTS = gauge("raytide_alerts", "Alerts that fire now", "alert", "severity")
ACTIONS = counter("raytide_actions", "Actions that alerts caused, by how they ended", "action", "outcome")
ANOMALY_SCORE = gauge("raytide_anomaly_score", "Robust z-score of a signal's last value", "signal", "subject")
CERTIFICATE_LEFT = gauge(
    "raytide_certificate_left_seconds",
    "Time until the certificate of an https address that raytide calls or watches expires; negative once it has",
    "address",
)
SCRAPE_UP = gauge("raytide_scrape_up", "1 if the last scrape of a target succeeded", "job", "instance")
