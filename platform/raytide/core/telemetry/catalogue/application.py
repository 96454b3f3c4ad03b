"""Metrics of the gateway: requests, their latencies, tokens, and limits."""

from raytide.core.telemetry.catalogue.buckets import FIRST_TOKEN_S, INTER_TOKEN_S, PHASE_S, REQUEST_S, TOKEN_COUNTS
from raytide.core.telemetry.metrics import Metric

_REVISION = ("endpoint", "revision")

REQUESTS = Metric(
    "raytide_requests",
    "counter",
    "Requests by how they ended: ok, aborted (the client left), invalid, limited (by "
    "their key), rejected (no capacity) or error. "
    "The code is that of the error, or empty",
    "application",
    labels=(*_REVISION, "api", "outcome", "code"),
)
FIRST_TOKEN_SECONDS = Metric(
    "raytide_time_to_first_token_seconds",
    "histogram",
    "Time from a request to its first token",
    "application",
    "seconds",
    _REVISION,
    FIRST_TOKEN_S,
)
INTER_TOKEN_SECONDS = Metric(
    "raytide_inter_token_seconds",
    "histogram",
    "Time between two tokens of one request",
    "application",
    "seconds",
    _REVISION,
    INTER_TOKEN_S,
)
REQUEST_SECONDS = Metric(
    "raytide_request_seconds",
    "histogram",
    "Time from a request to its end",
    "application",
    "seconds",
    _REVISION,
    REQUEST_S,
)
QUEUE_SECONDS = Metric(
    "raytide_queue_seconds",
    "histogram",
    "Time that a request waits in its engine",
    "application",
    "seconds",
    _REVISION,
    PHASE_S,
)
PREFILL_SECONDS = Metric(
    "raytide_prefill_seconds",
    "histogram",
    "Time that the engine needs for a request's prompt",
    "application",
    "seconds",
    _REVISION,
    PHASE_S,
)
DECODE_SECONDS = Metric(
    "raytide_decode_seconds",
    "histogram",
    "Time from a request's first token to its last in the engine",
    "application",
    "seconds",
    _REVISION,
    PHASE_S,
)
INFERENCE_SECONDS = Metric(
    "raytide_inference_seconds",
    "histogram",
    "Time that a request runs in its engine: prefill and decode",
    "application",
    "seconds",
    _REVISION,
    PHASE_S,
)
REQUEST_PROMPT_TOKENS = Metric(
    "raytide_request_prompt_tokens",
    "histogram",
    "Prompt tokens of a request",
    "application",
    "tokens",
    _REVISION,
    TOKEN_COUNTS,
)
REQUEST_GENERATED_TOKENS = Metric(
    "raytide_request_generated_tokens",
    "histogram",
    "Generated tokens of a request",
    "application",
    "tokens",
    _REVISION,
    TOKEN_COUNTS,
)
SLO_REQUESTS = Metric(
    "raytide_slo_requests",
    "counter",
    "Requests of endpoints that promise a time to first token (replicas.slo_ttft_s), by whether they met it",
    "application",
    labels=("endpoint", "met"),
)
SLO_FIRST_TOKEN = Metric(
    "raytide_slo_first_token_seconds",
    "gauge",
    "The promised time to first token (replicas.slo_ttft_s)",
    "application",
    "seconds",
    ("endpoint",),
)
SLO_ERROR_BUDGET = Metric(
    "raytide_slo_error_budget_ratio",
    "gauge",
    "Share of the requests that may miss the promised time to first token: 1 - slo_target, or 0.01 without one",
    "application",
    "ratio",
    ("endpoint",),
)
TOKENS = Metric(
    "raytide_tokens",
    "counter",
    "Tokens by the team and the name of the key that used them: prompt, cached (a part of prompt) and generated",
    "application",
    "tokens",
    ("endpoint", "team", "key", "kind"),
)
RATE_LIMITED = Metric(
    "raytide_rate_limited",
    "counter",
    "Requests refused by a limit of their key or team",
    "application",
    labels=("team", "limit"),
)
FINISHED = Metric(
    "raytide_finished",
    "counter",
    "Choices of answers by why they ended: stop or length",
    "application",
    labels=("endpoint", "reason"),
)
RESUMED_STREAMS = Metric(
    "raytide_resumed_streams",
    "counter",
    "Answers that went on from another replica after theirs was lost",
    "application",
    labels=("endpoint",),
)
REUSED_ANSWERS = Metric(
    "raytide_reused_answers",
    "counter",
    "Requests answered without computing: shared with one in flight, or kept",
    "application",
    labels=(*_REVISION, "how"),
)
REPLICAS_TARGET = Metric(
    "raytide_replicas_target", "gauge", "Target number of replicas", "application", labels=("endpoint",)
)
REPLICAS_READY = Metric("raytide_replicas_ready", "gauge", "Ready replicas", "application", labels=("endpoint",))
REPLICA_RESTARTS = Metric(
    "raytide_replica_restarts",
    "counter",
    "Replicas whose place another one took, after a failure or for a new spec",
    "application",
    labels=("endpoint",),
)
ONGOING = Metric(
    "raytide_endpoint_requests", "gauge", "Requests running or waiting", "application", labels=("endpoint",)
)
REQUEST_RATE = Metric(
    "raytide_endpoint_requests_per_second",
    "gauge",
    "Request rate of the last 30 seconds",
    "application",
    labels=("endpoint",),
)
REQUEST_FORECAST = Metric(
    "raytide_endpoint_forecast_requests_per_second",
    "gauge",
    "Forecast request rate after one cold start",
    "application",
    labels=("endpoint",),
)
OUTPUT_RATE = Metric(
    "raytide_endpoint_output_tokens_per_second",
    "gauge",
    "Generated tokens per second",
    "application",
    "tokens",
    ("endpoint",),
)
FIRST_TOKEN = Metric(
    "raytide_endpoint_first_token_seconds",
    "gauge",
    "Mean time to first token in the last 30 seconds",
    "application",
    "seconds",
    ("endpoint",),
)
