"""Alerts that several tests use."""

from dataclasses import replace
from typing import Any

from raytide.dashboards.alerts.states import Alert, AlertState
from raytide.dashboards.history.points import label_set

NOW_S = 1_700_000_000.0


def firing(name: str = "NodeSick", at_s: float = NOW_S, **labels: str) -> Alert:
    return Alert(
        name=name,
        labels=label_set(labels or {"node": "node-1"}),
        severity="critical",
        state=AlertState.FIRING,
        since_s=at_s,
        fired_at_s=at_s,
        value=2.0,
        summary="it is sick",
        page="https://example.org/runbook",
    )


def resolved(alert: Alert, at_s: float) -> Alert:
    return replace(alert, state=AlertState.RESOLVED, since_s=at_s)


def message(**fields: Any) -> dict[str, Any]:
    """Returns a message of Alertmanager 0.25, shortened to what it has for one alert."""
    alert = {
        "status": "firing",
        "labels": {"alertname": "NodeSick", "severity": "critical", "node": "node-1"},
        "annotations": {"summary": "it is sick"},
        "startsAt": "2023-11-14T22:13:20Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://host:9090/graph",
        "fingerprint": "e41a5af6d5d1a49c",
        **fields,
    }
    return {"version": "4", "groupKey": "{}:{}", "status": alert["status"], "receiver": "raytide", "alerts": [alert]}
