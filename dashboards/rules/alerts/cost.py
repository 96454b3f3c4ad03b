"""Alert rules on budgets and unit costs."""

from functools import partial

from raytide.core.telemetry.catalogue import cost, infrastructure, monitoring
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.expressions import Condition, OverTime, SetOperation, max_by, ratio, select, sum_by

_USED = max_by(select(cost.BUDGET_USED), "team")
_PRICE = select(cost.USD_PER_MTOKEN)
_GPUS = sum_by(select(infrastructure.GPUS))

_rule = partial(AlertRule, layer="cost")

ALERTS = (
    _rule(
        "BudgetForecastExceeded",
        "warning",
        Condition(max_by(select(cost.BUDGET_FORECAST), "team"), ">", 1),
        1800,
        "Team {team} will use {value:percent} of its budget by the end of the period",
        "`raytide cost --by job` shows where it goes; lower limits or raise the budget before it stops work.",
    ),
    _rule(
        "BudgetNearLimit",
        "warning",
        SetOperation(Condition(_USED, ">", 0.8), "and", Condition(_USED, "<=", 0.95)),
        0,
        "Team {team} has used {value:percent} of its budget",
        "Tell the team, or raise its budget: nothing of it starts once the budget is used up.",
    ),
    _rule(
        "BudgetNearlyUsed",
        "critical",
        SetOperation(Condition(_USED, ">", 0.95), "and", Condition(_USED, "<", 1)),
        0,
        "Team {team} has used {value:percent} of its budget",
        "Its work stops when the budget is used up: raise it, or pause what can wait.",
        "pause_budget",
    ),
    _rule(
        "BudgetExhausted",
        "critical",
        Condition(_USED, ">=", 1),
        0,
        "Team {team} has used up its budget",
        "Its queued jobs do not start until the budget is raised or the next period begins.",
    ),
    _rule(
        "CostAnomaly",
        "warning",
        Condition(max_by(select(monitoring.ANOMALY_SCORE, signal="cost"), "subject"), ">", 4),
        600,
        "The cost of {subject} is {value} deviations above its usual",
        "Compare `raytide cost --by job` of today and of the last week.",
    ),
    _rule(
        "IdleSpendHigh",
        "warning",
        Condition(ratio(sum_by(select(infrastructure.GPUS, use="idle")), _GPUS), ">", 0.5),
        3600,
        "{value:percent} of the GPUs that are paid for have been idle for an hour",
        "Shorten idle_timeout_s, lower min_workers or an endpoint's min, or fill them with preemptible jobs.",
    ),
    _rule(
        "PricePerMTokRegressed",
        "info",
        Condition(
            ratio(
                max_by(OverTime("avg", _PRICE, 3600), "endpoint"),
                max_by(OverTime("avg", _PRICE, 7 * 86400), "endpoint"),
            ),
            ">",
            1.5,
        ),
        1800,
        "A million tokens of {endpoint} cost {value} times what they cost over the last week",
        "Less load on the same replicas, a dearer market, or a slower revision.",
    ),
)
