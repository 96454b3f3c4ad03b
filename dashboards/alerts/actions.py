"""Finds the actions that are due, as a pure function of alerts, configuration and the log of actions.

Each entry for an action in cluster.yaml acts at most once in an episode of an alert. A cool-down and a rate limit can
delay an action. A delayed action is run later if the alert still fires then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from raytide.core.telemetry.settings import AlertAction
from raytide.dashboards.alerts.records import ActionRecord
from raytide.dashboards.alerts.states import Alert, AlertState

_HOUR_S = 3600.0
_LABELS = {
    "restart_replica": ("replica",),
    "replace_node": ("node", "Hostname"),
    "quarantine_node": ("node", "Hostname"),
    "rollback": ("endpoint",),
    "pause_budget": ("team",),
}
"""The labels of an alert that name the object of an action."""


@dataclass(frozen=True, slots=True)
class DueAction:
    """An action that is due, with the alert that causes it."""

    key: str
    entry: str
    action: AlertAction
    alert: Alert
    object: str
    """The object of the action; for commands and webhooks, the alert. Empty if the alert does not name one."""
    held: str = ""
    """The reason why the action has to wait; empty if it may be run now."""


def entry_of(action: AlertAction) -> str:
    """Returns a hash that identifies an action's entry in cluster.yaml. Changed limits do not change the hash."""
    text = action.model_dump_json(include={"alert", "do", "command", "url"})
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def object_of(action: AlertAction, alert: Alert) -> str:
    names = _LABELS.get(action.do)
    return alert.id if names is None else alert.label(*names)


def due_actions(
    alerts: Iterable[Alert],
    actions: Sequence[AlertAction],
    log: Collection[ActionRecord],
    silenced: Collection[str],
    now_s: float,
) -> list[DueAction]:
    """Returns the actions of firing alerts that are not silenced, except actions that were begun already.

    Actions that the cool-down or the rate limit delays are included, with the reason in `held`.
    """
    begun = {record.key for record in log if record.state != "held"}
    done = [record for record in log if record.state != "held"]
    due: list[DueAction] = []
    for alert in alerts:
        if alert.state is not AlertState.FIRING or alert.name in silenced:
            continue
        for action in actions:
            if action.alert != alert.name:
                continue
            entry, subject = entry_of(action), object_of(action, alert)
            key = f"{alert.episode}-{entry}"
            if key in begun:
                continue
            begun.add(key)
            mine = [(record.object, record.at_s) for record in done if record.entry == entry]
            mine += [(each.object, now_s) for each in due if each.entry == entry and not each.held]
            due.append(DueAction(key, entry, action, alert, subject, _held(action, subject, mine, now_s)))
    return due


def _held(action: AlertAction, subject: str, mine: Collection[tuple[str, float]], now_s: float) -> str:
    """Returns why an action has to wait; empty if it need not. `mine`: (object, time) of each earlier action of the
    same entry.
    """
    last_s = max((at_s for object, at_s in mine if object == subject), default=None)
    if last_s is not None and 0 <= now_s - last_s < action.cooldown_s:
        left_s = last_s + action.cooldown_s - now_s
        return f"cool-down: {subject} had one {now_s - last_s:.0f} s ago; another may follow in {left_s:.0f} s"
    recent = sum(0 <= now_s - at_s < _HOUR_S for _, at_s in mine)
    if recent >= action.most_per_h:
        return f"rate limit: {recent} in the last hour, and at most {action.most_per_h} may be"
    return ""
