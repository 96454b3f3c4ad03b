"""Alert rules on what users and probes experience."""

from functools import partial

from raytide.core.telemetry.catalogue import client, monitoring
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.expressions import (
    Condition,
    OverTime,
    Quantile,
    SetOperation,
    max_by,
    ratio,
    select,
    sum_by,
)

_PROBE = ("endpoint", "probe")
_THUMBS_DOWN = sum_by(OverTime("increase", select(client.FEEDBACK, thumb="down"), 3600), "endpoint")
_THUMBS = sum_by(OverTime("increase", select(client.FEEDBACK), 3600), "endpoint")
_ANSWERED = max_by(select(monitoring.PROBE_SUCCESS), *_PROBE)

_rule = partial(AlertRule, layer="client")

ALERTS = (
    _rule(
        "UserThumbsDownRatioHigh",
        "warning",
        SetOperation(Condition(ratio(_THUMBS_DOWN, _THUMBS), ">", 0.3), "and", Condition(_THUMBS, ">", 10)),
        0,
        "{value:percent} of the last hour's feedback on {endpoint} is negative",
        "Compare the feedback by revision; a new one can be rolled back.",
        "rollback",
    ),
    _rule(
        "SyntheticProbeFailing",
        "critical",
        Condition(_ANSWERED, "==", 0),
        120,
        "The probe {probe} of {endpoint} gets no answer",
        "Users do not get one either: look at the endpoint's replicas and the gateways' logs.",
    ),
    _rule(
        "SyntheticAnswerWrong",
        "critical",
        SetOperation(
            Condition(max_by(select(monitoring.PROBE_ANSWER_RIGHT), *_PROBE), "==", 0),
            "and",
            Condition(_ANSWERED, "==", 1),
        ),
        120,
        "The probe {probe} of {endpoint} gets a wrong answer",
        "Was another model or template rolled out, or does a GPU compute wrongly? Roll back, look for ECC errors.",
        "rollback",
    ),
    _rule(
        "SyntheticLatencyHigh",
        "warning",
        Condition(Quantile(0.9, select(monitoring.PROBE_SECONDS), 1800, _PROBE), ">", 10),
        300,
        "One in ten answers to the probe {probe} of {endpoint} takes {value:seconds} or more",
        "Compare the endpoint's queue, prefill and decode times.",
    ),
)
