"""Alert rules on models and the engines that run them."""

from functools import partial

from raytide.core.telemetry.catalogue import application, model
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.expressions import (
    Condition,
    OverTime,
    Rate,
    SetOperation,
    max_by,
    ratio,
    select,
    sum_by,
)
from raytide.dashboards.rules.recordings import CACHE_HITS_1D, CACHE_HITS_15M

_REPLICA = ("endpoint", "replica")
_REQUESTS = sum_by(Rate(select(application.REQUESTS), 600), "endpoint")
_FINISHED = sum_by(Rate(select(application.FINISHED), 1800), "endpoint")

_rule = partial(AlertRule, layer="model")

ALERTS = (
    _rule(
        "ReplicaStalled",
        "critical",
        SetOperation(
            Condition(max_by(select(model.RUNNING), *_REPLICA), ">", 0),
            "and",
            Condition(max_by(OverTime("increase", select(model.STEPS), 120), *_REPLICA), "==", 0),
        ),
        60,
        "Replica {replica} of {endpoint} holds {value} requests and has computed no step for two minutes",
        "Its log says what it last did; restart it. Its streams go on from another replica.",
        "restart_replica",
    ),
    _rule(
        "EngineFailing",
        "warning",
        Condition(sum_by(OverTime("increase", select(model.ENGINE_FAILURES), 600), *_REPLICA), ">", 0),
        0,
        "Engine steps of replica {replica} of {endpoint} failed in the last ten minutes",
        "The replicas' logs have the error (`raytide logs`).",
        "restart_replica",
    ),
    _rule(
        "KvCacheNearlyFull",
        "warning",
        Condition(max_by(select(model.KV_USE_RATIO), *_REPLICA), ">", 0.95),
        300,
        "The KV cache of replica {replica} of {endpoint} is {value:percent} full",
        "Requests will wait or be preempted: raise replicas.max, or use nodes with more memory.",
    ),
    _rule(
        "PreemptionsHigh",
        "warning",
        Condition(ratio(sum_by(Rate(select(model.PREEMPTIONS), 600), "endpoint"), _REQUESTS), ">", 0.1),
        600,
        "{endpoint} preempts {value:percent} of its requests for lack of KV blocks",
        "The KV cache is too small for the load: raise replicas.max, or lower the engine's number of sequences.",
    ),
    _rule(
        "SpecDecodeAcceptanceLow",
        "info",
        SetOperation(
            Condition(
                ratio(
                    sum_by(Rate(select(model.ACCEPTED_TOKENS), 1800), "endpoint"),
                    sum_by(Rate(select(model.DRAFT_TOKENS), 1800), "endpoint"),
                ),
                "<",
                0.2,
            ),
            "and",
            Condition(sum_by(Rate(select(model.DRAFT_TOKENS), 1800), "endpoint"), ">", 1),
        ),
        1800,
        "{endpoint} accepts {value:percent} of the tokens that are guessed ahead",
        "Its answers repeat little. The engine guesses less by itself; engine.speculation: off saves the rest too.",
    ),
    _rule(
        "PrefixHitRateCollapsed",
        "info",
        SetOperation(
            Condition(ratio(CACHE_HITS_15M, CACHE_HITS_1D), "<", 0.3), "and", Condition(CACHE_HITS_1D, ">", 0.2)
        ),
        900,
        "{endpoint} finds {value:percent} of the prefixes in its cache that it found over the last day",
        "Did prompts change their beginning, or did a rollout or a scale-up empty the caches?",
    ),
    _rule(
        "ContextOverflowErrorsHigh",
        "warning",
        Condition(
            ratio(
                sum_by(Rate(select(application.REQUESTS, code="context_length_exceeded"), 600), "endpoint"), _REQUESTS
            ),
            ">",
            0.1,
        ),
        600,
        "{value:percent} of the requests of {endpoint} exceed its context",
        "Tell its users the limit, or serve it with a longer one (engine.max_model_len).",
    ),
    _rule(
        "StopReasonLengthSurge",
        "info",
        Condition(
            ratio(sum_by(Rate(select(application.FINISHED, reason="length"), 1800), "endpoint"), _FINISHED), ">", 0.5
        ),
        1800,
        "{value:percent} of the answers of {endpoint} end at their length limit",
        "Answers are cut off, or a model does not stop: look at max_tokens, the chat template and the last rollout.",
    ),
    _rule(
        "PerplexityDrift",
        "warning",
        Condition(
            ratio(
                max_by(OverTime("avg", select(model.SERVED_PERPLEXITY), 3600), "endpoint"),
                max_by(OverTime("avg", select(model.SERVED_PERPLEXITY), 86400), "endpoint"),
            ),
            ">",
            1.3,
        ),
        1800,
        "The perplexity of {endpoint}'s answers is {value} times that of the last day",
        "Prompts changed, or a revision or quantization made the model worse: compare revisions, roll back.",
        "rollback",
    ),
    _rule(
        "LoraLoadFailing",
        "warning",
        Condition(max_by(select(model.ADAPTERS, state="failed"), "endpoint"), ">", 0),
        300,
        "{value} adapters on the replicas of {endpoint} cannot be loaded",
        "`raytide endpoint adapters NAME` shows the errors: another base model, a missing file, or max_loras.",
    ),
)
