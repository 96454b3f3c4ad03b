"""Metrics of the gateway and of endpoints: requests, latencies, tokens, limits, batches, rollouts and replicas."""

from raytide.core.telemetry.catalogue.buckets import FIRST_TOKEN_S, INTER_TOKEN_S, PHASE_S, REQUEST_S, TOKEN_COUNTS
from raytide.core.telemetry.metrics import counter, gauge, histogram

_REVISION = ("endpoint", "revision")

REQUESTS = counter(
    "raytide_requests",
    "Requests by how they ended: ok, aborted (the client left), invalid, limited (by "
    "their key), rejected (no capacity) or error. "
    "The code is that of the error, or empty",
    *_REVISION,
    "api",
    "outcome",
    "code",
)
FIRST_TOKEN_SECONDS = histogram(
    "raytide_time_to_first_token_seconds", "Time from a request to its first token", FIRST_TOKEN_S, *_REVISION
)
INTER_TOKEN_SECONDS = histogram(
    "raytide_inter_token_seconds", "Time between two tokens of one request", INTER_TOKEN_S, *_REVISION
)
REQUEST_SECONDS = histogram("raytide_request_seconds", "Time from a request to its end", REQUEST_S, *_REVISION)
QUEUE_SECONDS = histogram("raytide_queue_seconds", "Time that a request waits in its engine", PHASE_S, *_REVISION)
PREFILL_SECONDS = histogram(
    "raytide_prefill_seconds", "Time that the engine needs for a request's prompt", PHASE_S, *_REVISION
)
DECODE_SECONDS = histogram(
    "raytide_decode_seconds", "Time from a request's first token to its last in the engine", PHASE_S, *_REVISION
)
INFERENCE_SECONDS = histogram(
    "raytide_inference_seconds", "Time that a request runs in its engine: prefill and decode", PHASE_S, *_REVISION
)
REQUEST_PROMPT_TOKENS = histogram(
    "raytide_request_prompt_tokens", "Prompt tokens of a request", TOKEN_COUNTS, *_REVISION
)
REQUEST_GENERATED_TOKENS = histogram(
    "raytide_request_generated_tokens", "Generated tokens of a request", TOKEN_COUNTS, *_REVISION
)
SLO_REQUESTS = counter(
    "raytide_slo_requests",
    "Requests of endpoints that promise a time to first token (replicas.slo_ttft_s), by whether they met it",
    "endpoint",
    "met",
)
SLO_FIRST_TOKEN = gauge(
    "raytide_slo_first_token_seconds", "The promised time to first token (replicas.slo_ttft_s)", "endpoint"
)
SLO_ERROR_BUDGET = gauge(
    "raytide_slo_error_budget_ratio",
    "Share of the requests that may miss the promised time to first token: 1 - slo_target, or 0.01 without one",
    "endpoint",
)
TOKENS = counter(
    "raytide_tokens",
    "Tokens by the team and the name of the key that used them: prompt, cached (a part of prompt) and generated",
    "endpoint",
    "team",
    "key",
    "kind",
)
RATE_LIMITED = counter("raytide_rate_limited", "Requests refused by a limit of their key or team", "team", "limit")
FINISHED = counter("raytide_finished", "Choices of answers by why they ended: stop or length", "endpoint", "reason")
RESUMED_STREAMS = counter(
    "raytide_resumed_streams", "Answers that went on from another replica after theirs was lost", "endpoint"
)
CANARY_REGRESSION = gauge(
    "raytide_canary_regression_ratio",
    "Excess of a challenger's share of bad requests over its champion's, by the criterion (errors, late, disliked, or "
    "metric and its name) by which the canary was rolled back in the last hour",
    "endpoint",
    "criterion",
)
SHADOW_ANSWERS = counter(
    "raytide_shadow_answers",
    "Greedy answers of a shadowed challenger, by whether they equal the champion's",
    "endpoint",
    "equal",
)
BATCH_LEFT = gauge(
    "raytide_batch_left_seconds", "Time until a batch expires; the 20 oldest that have not ended", "batch", "team"
)
BATCH_DONE = gauge("raytide_batch_done_ratio", "Share of a batch's rows that are answered or failed", "batch", "team")
REUSED_ANSWERS = counter(
    "raytide_reused_answers",
    "Requests answered without computing: shared with one in flight, or kept",
    *_REVISION,
    "how",
)
REPLICAS_TARGET = gauge("raytide_replicas_target", "Target number of replicas", "endpoint")
REPLICAS_READY = gauge("raytide_replicas_ready", "Ready replicas", "endpoint")
REPLICA_RESTARTS = counter(
    "raytide_replica_restarts", "Replicas whose place another one took, after a failure or for a new spec", "endpoint"
)
ONGOING = gauge("raytide_endpoint_requests", "Requests running or waiting", "endpoint")
REQUEST_RATE = gauge("raytide_endpoint_requests_per_second", "Request rate of the last 30 seconds", "endpoint")
REQUEST_FORECAST = gauge(
    "raytide_endpoint_forecast_requests_per_second", "Forecast request rate after one cold start", "endpoint"
)
OUTPUT_RATE = gauge("raytide_endpoint_output_tokens_per_second", "Generated tokens per second", "endpoint")
FIRST_TOKEN = gauge(
    "raytide_endpoint_first_token_seconds", "Mean time to first token in the last 30 seconds", "endpoint"
)
