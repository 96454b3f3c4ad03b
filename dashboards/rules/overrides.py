"""Adjusts the alert rules: applies the bounds and durations that a cluster.yaml sets."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from raytide.core.errors import ConfigError
from raytide.core.telemetry.settings import AlertOverride
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.alerts import ALERTS, GROUPS


def adjusted_groups(overrides: Mapping[str, AlertOverride]) -> dict[str, tuple[AlertRule, ...]]:
    """Returns the alert rules by group, adjusted by the overrides and without rules that are switched off.

    Raises ConfigError if an override names an alert that does not exist, or gives a bound to a rule without one.
    """
    names = [rule.name for rule in ALERTS]
    for name in overrides:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            raise ConfigError(
                f"metadata.raytide.monitoring.alerts: there is no alert {name}"
                + (f" (did you mean {near[0]}?)." if near else "."),
                hint="docs/monitoring.md lists the alerts.",
            )
    off = {name for name, override in overrides.items() if override.off}
    return {
        group: tuple(_adjusted(rule, overrides.get(rule.name)) for rule in rules if rule.name not in off)
        for group, rules in GROUPS.items()
    }


def _adjusted(rule: AlertRule, override: AlertOverride | None) -> AlertRule:
    if override is None:
        return rule
    for_s = None if override.for_s is None else round(override.for_s)
    return rule.adjusted(bound=override.bound, for_s=for_s)
