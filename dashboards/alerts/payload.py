"""Alertmanager's webhook format, version 4. Parses messages from a real Alertmanager, and writes messages for raytide's
own receivers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from raytide.core.bounds import printable
from raytide.core.errors import UsageError
from raytide.dashboards.alerts.states import Alert, AlertState
from raytide.dashboards.history.points import label_set

MOST_ALERTS = 2000
_MOST_LABELS, _MOST_LABEL_CHARS, _MOST_TEXT = 64, 1000, 4000


def alerts_from_payload(body: Mapping[str, Any], now_s: float) -> list[Alert]:
    """Returns the alerts of a webhook message. Raises UsageError if the message is not of version 4."""
    if body.get("version") != "4" or not isinstance(body.get("alerts"), list):
        raise UsageError("this is no message of Alertmanager (version 4).", hint="Configure a `webhook_configs` entry.")
    if len(body["alerts"]) > MOST_ALERTS:
        raise UsageError(f"a message has at most {MOST_ALERTS} alerts.", hint="Set `max_alerts` of the webhook.")
    return [_alert(each, now_s) for each in body["alerts"]]


def _alert(raw: object, now_s: float) -> Alert:
    fields = raw if isinstance(raw, dict) else {}
    labels, notes = _texts(fields.get("labels")), _texts(fields.get("annotations"))
    name, severity = labels.pop("alertname", ""), labels.pop("severity", "")
    if not name or fields.get("status") not in ("firing", "resolved"):
        raise UsageError("an alert of the message has no `alertname` or `status`.", hint="See docs/alerts.md.")
    started_s = min(now_s, _seconds(fields.get("startsAt"), now_s))
    is_firing = fields["status"] == "firing"
    return Alert(
        name=name,
        labels=label_set({key: value for key, value in labels.items() if value}),
        severity=severity if severity in ("info", "critical") else "warning",  # type: ignore[arg-type]
        state=AlertState.FIRING if is_firing else AlertState.RESOLVED,
        since_s=started_s if is_firing else min(now_s, _seconds(fields.get("endsAt"), now_s)),
        fired_at_s=started_s,
        value=_number(notes.get("value")),
        summary=notes.get("summary", "") or notes.get("description", ""),
        page=notes.get("runbook_url", "") or notes.get("runbook", ""),
        source="alertmanager",
    )


def payload_of(alerts: Iterable[Alert], receiver: str) -> dict[str, Any]:
    """Returns a webhook message in Alertmanager's format with these alerts."""
    listed = list(alerts)
    names = {alert.name for alert in listed}
    common = {"alertname": next(iter(names))} if len(names) == 1 else {}
    return {
        "version": "4",
        "groupKey": "{}:{" + ",".join(f'alertname="{name}"' for name in sorted(names)) + "}",
        "truncatedAlerts": 0,
        "status": "firing" if any(alert.state is AlertState.FIRING for alert in listed) else "resolved",
        "receiver": receiver,
        "groupLabels": common,
        "commonLabels": common,
        "commonAnnotations": {},
        "externalURL": "",
        "alerts": [alert_json(alert) for alert in listed],
    }


def alert_json(alert: Alert) -> dict[str, Any]:
    is_over = alert.state is AlertState.RESOLVED
    return {
        "status": "resolved" if is_over else "firing",
        "labels": {"alertname": alert.name, "severity": alert.severity, **dict(alert.labels)},
        "annotations": {"summary": alert.summary, "runbook_url": alert.page, "value": _text(alert.value)},
        "startsAt": _iso(alert.fired_at_s or alert.since_s),
        "endsAt": _iso(alert.since_s) if is_over else "0001-01-01T00:00:00Z",
        "generatorURL": "",
        "fingerprint": alert.id,
    }


def _texts(raw: object) -> dict[str, str]:
    if not isinstance(raw, dict):
        return {}
    pairs = list(raw.items())[:_MOST_LABELS]
    return {printable(str(key), _MOST_LABEL_CHARS): printable(str(value), _MOST_TEXT) for key, value in pairs}


def _seconds(raw: object, default_s: float) -> float:
    try:
        return max(0.0, datetime.fromisoformat(str(raw)).timestamp())
    except (ValueError, OverflowError, OSError):
        return default_s


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")
