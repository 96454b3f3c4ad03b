"""The states of alerts, as pure functions.

- PENDING: the rule's condition holds.
- FIRING: the condition has held for the rule's duration.
- RESOLVED: the condition of a firing alert no longer holds.

A pending alert whose condition ends is forgotten. A resolved alert that fires again begins a new episode.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from raytide.core.telemetry.settings import Severity
from raytide.dashboards.history.points import Labels

TEST_LABEL = "raytide_test"
AlertSource = Literal["raytide", "alertmanager"]


class AlertState(StrEnum):
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert: a rule, and a set of labels for which the rule's condition holds or held."""

    name: str
    labels: Labels
    """The alert's labels, without its name and severity."""
    severity: Severity
    state: AlertState
    since_s: float
    """The time at which the state began."""
    fired_at_s: float | None = None
    """The time at which the last episode of the alert began to fire, by which the log of actions names the episode.
    None if the alert has not fired, as far as is remembered.
    """
    value: float | None = None
    summary: str = ""
    page: str = ""
    """The runbook's page, with the meaning of the alert and what to do."""
    source: AlertSource = "raytide"

    @property
    def id(self) -> str:
        return fingerprint(self.name, self.labels)

    @property
    def episode(self) -> str:
        """The unique name of the present episode, in which the alert fires without a break."""
        return f"{self.id}-{int((self.fired_at_s or self.since_s) * 1000)}"

    @property
    def is_test(self) -> bool:
        """True if the alert comes from `raytide alerts test`. The actions of such an alert are dry runs."""
        return self.label(TEST_LABEL) == "true"

    def label(self, *names: str) -> str:
        """Returns the value of the first of these labels that the alert has. Returns an empty string if it has none of
        them.
        """
        have = dict(self.labels)
        return next((have[name] for name in names if have.get(name)), "")


@dataclass(frozen=True, slots=True)
class Observed:
    """A rule as evaluated now: `found` has the values for which the rule's condition holds, by their labels."""

    name: str
    severity: Severity
    for_s: float
    found: Mapping[Labels, float]
    summary: str = ""
    page: str = ""


def fingerprint(name: str, labels: Labels) -> str:
    return hashlib.sha256(json.dumps([name, sorted(labels)]).encode()).hexdigest()[:16]


def advance(known: Mapping[str, Alert], observed: Iterable[Observed], now_s: float) -> list[Alert]:
    """Compares the rules' present observations with their known alerts. Returns the alerts that changed.

    `known` maps ids to alerts. A pending alert whose condition has ended is returned as resolved, although it never
    fired. The caller must forget such an alert.
    """
    changed: list[Alert] = []
    for rule in observed:
        held = {fingerprint(rule.name, labels): (labels, value) for labels, value in rule.found.items()}
        for id, (labels, value) in held.items():
            alert = _holding(known.get(id), rule, labels, value, now_s)
            if alert != known.get(id):
                changed.append(alert)
        for id, alert in known.items():
            if alert.name == rule.name and id not in held and alert.state is not AlertState.RESOLVED:
                changed.append(replace(alert, state=AlertState.RESOLVED, since_s=now_s))
    return changed


def _holding(known: Alert | None, rule: Observed, labels: Labels, value: float, now_s: float) -> Alert:
    """Returns the alert of a condition that holds now."""
    if known is None or known.state is AlertState.RESOLVED:
        fired_at_s = None if known is None else known.fired_at_s  # of its last episode, whose end may not be told yet
        known = Alert(rule.name, labels, rule.severity, AlertState.PENDING, now_s, fired_at_s)
    known = replace(known, since_s=min(known.since_s, now_s))  # the clock may have been set back
    known = replace(known, value=value, severity=rule.severity, summary=_filled(rule.summary, labels), page=rule.page)
    if known.state is AlertState.PENDING and now_s - known.since_s >= rule.for_s:
        return replace(known, state=AlertState.FIRING, since_s=now_s, fired_at_s=now_s)
    return known


def _filled(summary: str, labels: Labels) -> str:
    """Returns a rule's summary with the labels in place of `{{ $labels.NAME }}`, as Prometheus writes it."""
    for name, value in labels:
        for mark in (f"{{{{ $labels.{name} }}}}", f"{{{{$labels.{name}}}}}"):
            summary = summary.replace(mark, value)
    return summary
