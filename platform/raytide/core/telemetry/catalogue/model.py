"""Metrics of models and the engines that run them."""

from raytide.core.telemetry.metrics import Metric

_REVISION = ("endpoint", "revision")
_REPLICA = (*_REVISION, "replica")

RUNNING = Metric("raytide_requests_running", "gauge", "Requests that hold KV blocks", "model", labels=_REPLICA)
WAITING = Metric(
    "raytide_requests_waiting", "gauge", "Requests that wait for a place in the engine", "model", labels=_REPLICA
)
KV_USE_RATIO = Metric("raytide_kv_use_ratio", "gauge", "Share of the KV blocks in use", "model", "ratio", _REPLICA)
STEP_SECONDS = Metric(
    "raytide_step_seconds", "gauge", "Moving average of one engine step", "model", "seconds", _REPLICA
)
STEPS = Metric("raytide_steps", "counter", "Engine steps", "model", labels=_REPLICA)
PROMPT_TOKENS = Metric("raytide_prompt_tokens", "counter", "Prompt tokens of requests", "model", "tokens", _REPLICA)
GENERATED_TOKENS = Metric("raytide_generated_tokens", "counter", "Tokens generated", "model", "tokens", _REPLICA)
CACHED_TOKENS = Metric(
    "raytide_cached_tokens", "counter", "Prompt tokens found in the prefix cache", "model", "tokens", _REPLICA
)
DRAFTS = Metric("raytide_drafts", "counter", "Drafts computed along", "model", labels=(*_REPLICA, "source"))
DRAFT_TOKENS = Metric(
    "raytide_draft_tokens", "counter", "Tokens of drafts computed along", "model", "tokens", (*_REPLICA, "source")
)
ACCEPTED_TOKENS = Metric(
    "raytide_accepted_tokens", "counter", "Tokens of drafts that were right", "model", "tokens", (*_REPLICA, "source")
)
PREEMPTIONS = Metric(
    "raytide_preemptions", "counter", "Sequences that lost their KV blocks and start over", "model", labels=_REPLICA
)
ENGINE_FAILURES = Metric(
    "raytide_engine_failures", "counter", "Requests that failed in the engine", "model", labels=_REPLICA
)
KV_USE = Metric(
    "raytide_endpoint_kv_use_ratio",
    "gauge",
    "Mean KV cache usage of the ready replicas",
    "model",
    "ratio",
    ("endpoint",),
)
SERVED_LOGPROB = Metric(
    "raytide_served_logprob",
    "gauge",
    "Mean log probability of the tokens of sampled answers, in nats",
    "model",
    labels=_REVISION,
)
SERVED_PERPLEXITY = Metric(
    "raytide_served_perplexity",
    "gauge",
    "Perplexity of sampled answers: exp of the negative mean log probability",
    "model",
    labels=_REVISION,
)
