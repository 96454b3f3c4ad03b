"""Alert rules on the gateway's metrics: SLOs, errors, latencies, limits, and the replicas behind the gateway."""

from functools import partial

from raytide.core.telemetry.catalogue import application
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.expressions import (
    Arithmetic,
    Condition,
    Expression,
    OverTime,
    Quantile,
    Rate,
    Selector,
    SetOperation,
    matching,
    max_by,
    ratio,
    select,
    sum_by,
)
from raytide.dashboards.rules.recordings import BURN_RATES, FIRST_TOKEN_P99, INTER_TOKEN_P99


def _share(outcome: str, window_s: int) -> Arithmetic:
    """Returns the share of an endpoint's requests that had this outcome."""
    part = sum_by(Rate(select(application.REQUESTS, outcome=outcome), window_s), "endpoint")
    return ratio(part, sum_by(Rate(select(application.REQUESTS), window_s), "endpoint"))


def _burns(factor: float, long_s: int, short_s: int) -> Expression:
    """Returns the condition that the error budget burns faster than `factor` in both windows: the long window shows
    that it matters, the short one that it still goes on.
    """
    return SetOperation(Condition(BURN_RATES[long_s], ">", factor), "and", Condition(BURN_RATES[short_s], ">", factor))


_BATCH = ("batch", "team")
_SHADOW = sum_by(OverTime("increase", select(application.SHADOW_ANSWERS), 3600), "endpoint")
_SHADOW_OTHER = sum_by(OverTime("increase", select(application.SHADOW_ANSWERS, equal="false"), 3600), "endpoint")

_rule = partial(AlertRule, layer="application")

ALERTS = (
    _rule(
        "ErrorBudgetBurnFast",
        "critical",
        _burns(14.4, 3600, 300),
        120,
        "{endpoint} misses its promised first token {value} times as often as it may: a month's budget lasts two days",
        "Is there queueing, a slow revision, or too low a replicas.max? A new revision can be rolled back.",
        "rollback",
    ),
    _rule(
        "ErrorBudgetBurnSlow",
        "warning",
        _burns(6, 6 * 3600, 1800),
        900,
        "{endpoint} has missed its promised first token {value} times as often as it may for hours",
        "Raise replicas.max or min, use faster nodes, or promise a later first token (replicas.slo_ttft_s).",
    ),
    _rule(
        "Http5xxHigh",
        "critical",
        Condition(_share("error", 300), ">", 0.05),
        300,
        "{value:percent} of the requests of {endpoint} fail with a server error",
        "The logs of the gateways and replicas name the error; a new revision can be rolled back.",
        "rollback",
    ),
    _rule(
        "TtftP99AboveSlo",
        "warning",
        Condition(FIRST_TOKEN_P99, ">", max_by(select(application.SLO_FIRST_TOKEN), "endpoint")),
        600,
        "One in a hundred requests of {endpoint} waits {value:seconds} or more for its first token",
        "Compare queue and prefill times: queueing wants replicas, a long prefill wants chunks or faster nodes.",
    ),
    _rule(
        "TpotP99High",
        "warning",
        Condition(INTER_TOKEN_P99, ">", 0.5),
        600,
        "One in a hundred tokens of {endpoint} takes {value:seconds} or more",
        "Large batches, long prefills between the steps, or a slow node: compare the replicas' step times.",
    ),
    _rule(
        "QueueTimeHigh",
        "warning",
        Condition(Quantile(0.9, select(application.QUEUE_SECONDS), 300, ("endpoint",)), ">", 5),
        600,
        "One in ten requests of {endpoint} waits {value:seconds} or more in its engine's queue",
        "Raise replicas.max, or find out why new replicas do not start: `raytide autoscaler explain`.",
    ),
    _rule(
        "AdmissionRejectionsHigh",
        "critical",
        Condition(_share("rejected", 300), ">", 0.05),
        300,
        "{endpoint} rejects {value:percent} of its requests for lack of capacity",
        "Raise replicas.max, limit its largest users, or name an overflow API.",
    ),
    _rule(
        "RateLimited429Surge",
        "info",
        Condition(sum_by(Rate(select(application.RATE_LIMITED), 300), "team"), ">", 1),
        600,
        "{value} requests of team {team} are refused each second by a limit",
        "A client may retry without waiting; otherwise the team needs a higher limit.",
    ),
    _rule(
        "ClientAbortsHigh",
        "warning",
        Condition(_share("aborted", 600), ">", 0.2),
        600,
        "Clients of {endpoint} give up on {value:percent} of their requests",
        "Are answers slower than the clients' timeouts, or too long?",
    ),
    _rule(
        "NoHealthyReplicas",
        "critical",
        SetOperation(
            Condition(max_by(select(application.REPLICAS_READY), "endpoint"), "==", 0),
            "and",
            Condition(max_by(select(application.REPLICAS_TARGET), "endpoint"), ">", 0),
        ),
        300,
        "{endpoint} has no ready replica, and should have one",
        "`raytide autoscaler explain` says why none is placed; the replicas' logs say why none starts.",
    ),
    _rule(
        "ReplicaUnreachable",
        "critical",
        Condition(max_by(Selector("up", matching(job="raytide-replica")), "endpoint", "replica"), "==", 0),
        30,
        "Replica {replica} of {endpoint} does not answer: it hangs, or its node is cut off",
        "Restart it. Its streams go on from another replica.",
        "restart_replica",
    ),
    _rule(
        "ReplicaFlapping",
        "warning",
        Condition(sum_by(OverTime("increase", select(application.REPLICA_RESTARTS), 1800), "endpoint"), ">", 3),
        0,
        "Replicas of {endpoint} ended {value} times in half an hour without being asked to",
        "Their logs say why: out of memory, a bad revision, or nodes that are lost.",
        "rollback",
    ),
    _rule(
        "CanaryRegression",
        "warning",
        Condition(max_by(select(application.CANARY_REGRESSION), "endpoint", "criterion"), ">", 0),
        0,
        "The canary of {endpoint} was rolled back: its {criterion} exceed the champion's by {value:percent}",
        "`raytide endpoint rollout` shows the numbers; compare the revisions' logs before you try again.",
    ),
    _rule(
        "ShadowDivergenceHigh",
        "info",
        SetOperation(Condition(ratio(_SHADOW_OTHER, _SHADOW), ">", 0.2), "and", Condition(_SHADOW, ">", 20)),
        0,
        "{value:percent} of the shadowed answers of {endpoint} differ from the champion's",
        "Expected of another model; of the same weights it means other numerics, quantization or a wrong template.",
    ),
    _rule(
        "BatchJobExpiringSoon",
        "warning",
        SetOperation(
            Condition(max_by(select(application.BATCH_LEFT), *_BATCH), "<", 3 * 3600),
            "and",
            Condition(max_by(select(application.BATCH_DONE), *_BATCH), "<", 1),
        ),
        300,
        "The batch {batch} of team {team} expires in {value:seconds}, and is not done",
        "Its rows run behind clients' requests: raise replicas.max of its endpoint until it is done.",
    ),
    _rule(
        "ScaleUpThrashing",
        "info",
        Condition(max_by(OverTime("changes", select(application.REPLICAS_TARGET), 1800), "endpoint"), ">", 10),
        0,
        "The target number of replicas of {endpoint} changed {value} times in half an hour",
        "Give it a longer scale-down delay, or a higher min.",
    ),
)
