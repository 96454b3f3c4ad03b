"""Renders stored plans (`Plan.to_json`) as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from raytide.core.money import format_usd

_SUBJECT = {
    "admit": "job_id",
    "requeue": "job_id",
    "preempt": "job_id",
    "shrink": "job_id",
    "grow": "job_id",
    "wait": "subject",
    "assign": "lease_id",
    "unassign": "lease_id",
    "launch": "node_id",
    "scale": "endpoint",
    "drain": "node_id",
    "terminate": "node_id",
}

AFTER_KIND = 21
"""The column of the object in a line, after time and kind."""


def lines(plans: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the plans' actions as lines, oldest first. Each line contains the time, kind, object, reason and cost of
    one action. The next lines contain the action's rejected alternatives, one in each line. A wait that continues over
    several plans is listed once.
    """
    last: dict[tuple[str, str], str] = {}
    out = []
    for plan in plans:
        at = datetime.fromtimestamp(float(plan["at_s"]), tz=UTC).astimezone().strftime("%H:%M:%S")
        for action in plan["actions"]:
            text = _action(action)
            key = (str(action["action"]), str(action.get(_SUBJECT.get(str(action["action"]), ""), "")))
            if key[0] == "wait" and last.get(key) == text:
                continue
            last[key] = text
            out.append(f"{at}  {text}")
            out += [" " * AFTER_KIND + _rejected(rejected) for rejected in action.get("rejected", ())]
    return out


def _action(action: Mapping[str, Any]) -> str:
    kind = str(action["action"])
    subject = str(action.get(_SUBJECT.get(kind, ""), ""))
    what = f"{subject}{_detail(kind, action)}"
    remedy = f" {action['remedy']}" if action.get("remedy") else ""
    cost = f" ({_an_hour(action['cost_micro_usd_h'])})" if action.get("cost_micro_usd_h") else ""
    return f"{kind:<9}  {what:<28}  {action.get('reason', '')}{remedy}{cost}"


def _rejected(rejected: Mapping[str, Any]) -> str:
    extra = rejected.get("extra_micro_usd_h")
    cost = "" if extra is None else f" ({_an_hour(extra)})"
    return f"not {rejected['choice']}: {rejected['reason']}{cost}"


def _an_hour(micro_usd_h: int) -> str:
    """Formats a price difference per hour, such as `+$1.20/h`."""
    return f"{'-' if micro_usd_h < 0 else '+'}{format_usd(abs(micro_usd_h))}/h"


def _detail(kind: str, action: Mapping[str, Any]) -> str:
    match kind:
        case "launch":
            return f" {action['node_type']} in {action['zone']} for {action['subject']}"
        case "assign" | "unassign":
            arrow = "->" if kind == "assign" else "<-"
            return f" member {action['member']} {arrow} {action['node_id']}"
        case "scale":
            return f" to {action['replicas']} replicas"
        case "drain":
            return f" ({action['kind']})"
        case "wait":
            return f" ({action['constraint']})"
        case "admit":
            return f" gets {action['lease']['id']}: {action['lease']['shape']}"
        case "requeue" | "preempt":
            return f" gives {action['lease_id']} back"
        case "shrink" | "grow":
            verb = "gives back" if kind == "shrink" else "gets back"
            return f" {verb} {len(action['members'])} members"
    return ""
