"""The dashboard of endpoints: requests, latencies, engines and responses."""

from raytide.core.telemetry.catalogue import application, client, model, monitoring
from raytide.dashboards.grafana.panels import Board, Query, events, gauge, panel, quantiles, rates, row, stacked, stat
from raytide.dashboards.rules.expressions import Expression, Rate, Selector, max_by, ratio, select, sum_by
from raytide.dashboards.rules.recordings import BURN_RATES


def _requests(**where: str) -> Expression:
    return sum_by(Rate(select(application.REQUESTS, **where), 300))


_PROMISE = Query(max_by(select(application.SLO_FIRST_TOKEN), "endpoint"), "promised {{endpoint}}", is_promise=True)
_FIRST_TOKEN_P99 = quantiles(application.FIRST_TOKEN_SECONDS, q=(0.99,))[0].expression
_HITS = ratio(
    sum_by(Rate(select(model.CACHED_TOKENS), 300), "endpoint"),
    sum_by(Rate(select(model.PROMPT_TOKENS), 300), "endpoint"),
)
_BURN = tuple(
    Query(Selector(burn.name), f"{burn.name.rpartition('rate')[2]} {{{{endpoint}}}}") for burn in BURN_RATES.values()
)
_REPLICA, _JOB, _GPU = ("endpoint", "replica"), ("job", "team"), ("node", "gpu")

SERVING = Board(
    "raytide-serving",
    "raytide / Serving",
    ("endpoint",),
    (
        row(
            "Now",
            stat("Requests", "reqps", _requests()),
            stat("Server errors", "percentunit", ratio(_requests(outcome="error"), _requests()), bound=0.05),
            stat("First token p99", "s", _FIRST_TOKEN_P99, empty="no requests"),
            stat("Tokens generated", "suffix: tok/s", sum_by(Rate(select(model.GENERATED_TOKENS), 300))),
            stat("Ready replicas", "short", sum_by(select(application.REPLICAS_READY))),
            stat(
                "Fullest KV cache", "percentunit", max_by(select(model.KV_USE_RATIO)), bound=0.95, empty="no replicas"
            ),
        ),
        row(
            "Requests",
            stacked("Requests by outcome", "reqps", rates(application.REQUESTS, "outcome")),
            panel("Errors by code", "reqps", events(application.REQUESTS, "code", outcome="error")),
            panel("Refused by limits", "reqps", events(application.RATE_LIMITED, "team", "limit")),
            stacked("Finish reasons", "reqps", rates(application.FINISHED, "reason")),
            panel(
                "Error budget burn",
                "short",
                *_BURN,
                bound=14.4,
                description="1 uses up the month's budget in a month; 14.4 over an hour in two days.",
            ),
            panel("Resumed streams", "reqps", events(application.RESUMED_STREAMS, "endpoint")),
        ),
        row(
            "Latency",
            panel("Time to first token", "s", *quantiles(application.FIRST_TOKEN_SECONDS, "endpoint"), _PROMISE),
            panel("Time between tokens", "s", *quantiles(application.INTER_TOKEN_SECONDS, "endpoint"), bound=0.5),
            panel("Whole requests", "s", *quantiles(application.REQUEST_SECONDS, "endpoint")),
            panel("Queue", "s", *quantiles(application.QUEUE_SECONDS, "endpoint"), bound=5),
            panel("Prefill", "s", *quantiles(application.PREFILL_SECONDS, "endpoint")),
            panel("Decode", "s", *quantiles(application.DECODE_SECONDS, "endpoint")),
            panel(
                "Distribution of the first token",
                "s",
                Query(sum_by(Rate(Selector("raytide_time_to_first_token_seconds_bucket"), 300), "le"), "{{le}}"),
                kind="heatmap",
            ),
            panel(
                "Distribution of whole requests",
                "s",
                Query(sum_by(Rate(Selector("raytide_request_seconds_bucket"), 300), "le"), "{{le}}"),
                kind="heatmap",
            ),
            panel(
                "Mean inter-token time",
                "s",
                Query(
                    ratio(
                        sum_by(Rate(Selector("raytide_inter_token_seconds_sum"), 300)),
                        sum_by(Rate(Selector("raytide_inter_token_seconds_count"), 300)),
                    ),
                    "mean",
                ),
            ),
        ),
        row(
            "Engines",
            panel(
                "Running and waiting",
                "short",
                Query(sum_by(select(model.RUNNING), *_REPLICA), "running {{endpoint}} {{replica}}"),
                Query(sum_by(select(model.WAITING), *_REPLICA), "waiting {{endpoint}} {{replica}}"),
            ),
            panel("KV cache", "percentunit", gauge(model.KV_USE_RATIO, *_REPLICA), bound=0.95),
            panel(
                "Tokens per second",
                "ops",
                Query(sum_by(Rate(select(model.PROMPT_TOKENS), 300), "endpoint"), "prompt {{endpoint}}"),
                Query(sum_by(Rate(select(model.GENERATED_TOKENS), 300), "endpoint"), "generated {{endpoint}}"),
            ),
            panel("Prefix cache hits", "percentunit", Query(_HITS, "{{endpoint}}")),
            panel("Engine step", "s", gauge(model.STEP_SECONDS, *_REPLICA)),
            panel(
                "Preemptions and failed steps",
                "ops",
                Query(sum_by(Rate(select(model.PREEMPTIONS), 300)), "preemptions", is_rare=True),
                Query(sum_by(Rate(select(model.ENGINE_FAILURES), 300)), "failed steps", is_rare=True),
            ),
            panel(
                "Replicas",
                "short",
                Query(sum_by(select(application.REPLICAS_READY), "endpoint"), "ready {{endpoint}}"),
                Query(sum_by(select(application.REPLICAS_TARGET), "endpoint"), "target {{endpoint}}", is_promise=True),
            ),
            panel(
                "Request rate and forecast",
                "reqps",
                Query(max_by(select(application.REQUEST_RATE), "endpoint"), "now {{endpoint}}"),
                Query(max_by(select(application.REQUEST_FORECAST), "endpoint"), "forecast {{endpoint}}"),
            ),
            stacked("Tokens by team", "suffix: tok/s", rates(application.TOKENS, "team", "kind")),
        ),
        row(
            "Answers",
            panel("Feedback", "ops", events(client.FEEDBACK, "endpoint", "thumb")),
            panel("Probes answered", "short", gauge(monitoring.PROBE_SUCCESS, "endpoint", "probe"), empty="no probes"),
            panel(
                "Perplexity of answers",
                "short",
                gauge(model.SERVED_PERPLEXITY, "endpoint", "revision"),
                description="Of one answer in a hundred, with engines that give log probabilities.",
                empty="nothing measured in the last hour",
            ),
        ),
    ),
)
