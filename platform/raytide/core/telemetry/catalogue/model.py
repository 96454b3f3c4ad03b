"""Metrics of models and the engines that run them."""

from raytide.core.telemetry.metrics import counter, gauge

_REVISION = ("endpoint", "revision")
_REPLICA = (*_REVISION, "replica")

RUNNING = gauge("raytide_requests_running", "Requests that hold KV blocks", *_REPLICA)
WAITING = gauge("raytide_requests_waiting", "Requests that wait for a place in the engine", *_REPLICA)
KV_USE_RATIO = gauge("raytide_kv_use_ratio", "Share of the KV blocks in use", *_REPLICA)
STEP_SECONDS = gauge("raytide_step_seconds", "Moving average of one engine step", *_REPLICA)
STEPS = counter("raytide_steps", "Engine steps", *_REPLICA)
PROMPT_TOKENS = counter("raytide_prompt_tokens", "Prompt tokens of requests", *_REPLICA)
GENERATED_TOKENS = counter("raytide_generated_tokens", "Tokens generated", *_REPLICA)
CACHED_TOKENS = counter("raytide_cached_tokens", "Prompt tokens found in the prefix cache", *_REPLICA)
DISK_CACHED_TOKENS = counter(
    "raytide_disk_cached_tokens", "Prompt tokens whose KV was read from the engine's local disk", *_REPLICA
)
DISK_CACHE_BYTES = gauge("raytide_disk_cache_bytes", "KV on the engine's local disk", *_REPLICA)
DISK_CACHE_ON = gauge("raytide_disk_cache_on", "1 while KV is kept on local disk, 0 after the disk failed", *_REPLICA)
DISK_EVICTIONS = counter("raytide_disk_cache_evictions", "KV blocks removed from local disk for others", *_REPLICA)
DISK_SKIPPED = counter(
    "raytide_disk_cache_skipped_blocks", "KV blocks not kept, because the disk writes too slowly", *_REPLICA
)
DISK_DAMAGED = counter("raytide_disk_cache_damaged_blocks", "KV blocks on local disk found damaged", *_REPLICA)
DRAFTS = counter("raytide_drafts", "Drafts computed along", *_REPLICA, "source")
DRAFT_TOKENS = counter("raytide_draft_tokens", "Tokens of drafts computed along", *_REPLICA, "source")
ACCEPTED_TOKENS = counter("raytide_accepted_tokens", "Tokens of drafts that were right", *_REPLICA, "source")
PREEMPTIONS = counter("raytide_preemptions", "Sequences that lost their KV blocks and start over", *_REPLICA)
ADAPTERS = gauge(
    "raytide_adapters",
    "Adapters on the replicas of an endpoint, by state: loaded, loading or failed",
    "endpoint",
    "state",
)
ENGINE_FAILURES = counter("raytide_engine_failures", "Requests that failed in the engine", *_REPLICA)
KV_USE = gauge("raytide_endpoint_kv_use_ratio", "Mean KV cache usage of the ready replicas", "endpoint")
SERVED_LOGPROB = gauge(
    "raytide_served_logprob", "Mean log probability of the tokens of sampled answers, in nats", *_REVISION
)
SERVED_PERPLEXITY = gauge(
    "raytide_served_perplexity", "Perplexity of sampled answers: exp of the negative mean log probability", *_REVISION
)
