"""All alert rules, grouped by layer: application, client, cost, infrastructure, model, operations and training."""

from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.alerts import (
    application,
    client,
    cost,
    infrastructure,
    model,
    operations,
    training,
)

GROUPS: dict[str, tuple[AlertRule, ...]] = {
    "client": client.ALERTS,
    "application": application.ALERTS,
    "model": model.ALERTS,
    "training": training.ALERTS,
    "infrastructure": infrastructure.ALERTS,
    "cost": cost.ALERTS,
    "operations": operations.ALERTS,
}
"""The rules that Prometheus and raytide's own evaluator watch."""

ALERTS: tuple[AlertRule, ...] = tuple(rule for rules in GROUPS.values() for rule in rules)
PROMETHEUS_ALERTS = operations.PROMETHEUS_ALERTS
