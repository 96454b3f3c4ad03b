"""raytide's metrics by the names of vLLM's server, so that dashboards made for it work: `/metrics?names=vllm`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from raytide.core.telemetry.catalogue import application, model
from raytide.core.telemetry.metrics import Metric, Sample

_NAMES: Mapping[Metric, tuple[str, ...]] = {
    model.RUNNING: ("num_requests_running",),
    model.WAITING: ("num_requests_waiting",),
    model.KV_USE_RATIO: ("kv_cache_usage_perc",),
    model.PREEMPTIONS: ("num_preemptions",),
    model.DRAFTS: ("spec_decode_num_drafts",),
    model.DRAFT_TOKENS: ("spec_decode_num_draft_tokens",),
    model.ACCEPTED_TOKENS: ("spec_decode_num_accepted_tokens",),
    model.PROMPT_TOKENS: ("prompt_tokens", "prefix_cache_queries"),
    model.CACHED_TOKENS: ("prompt_tokens_cached", "prefix_cache_hits"),
    model.DISK_CACHED_TOKENS: ("external_prefix_cache_hits",),
    model.GENERATED_TOKENS: ("generation_tokens",),
    application.FINISHED: ("request_success",),
    application.FIRST_TOKEN_SECONDS: ("time_to_first_token_seconds",),
    application.INTER_TOKEN_SECONDS: ("inter_token_latency_seconds",),
    application.REQUEST_SECONDS: ("e2e_request_latency_seconds",),
    application.QUEUE_SECONDS: ("request_queue_time_seconds",),
    application.PREFILL_SECONDS: ("request_prefill_time_seconds",),
    application.DECODE_SECONDS: ("request_decode_time_seconds",),
    application.INFERENCE_SECONDS: ("request_inference_time_seconds",),
    application.REQUEST_PROMPT_TOKENS: ("request_prompt_tokens",),
    application.REQUEST_GENERATED_TOKENS: ("request_generation_tokens",),
}
_LABELS = {"endpoint": "model_name", "replica": "engine", "reason": "finished_reason"}

_RENAMED: Mapping[Metric, tuple[Metric, ...]] = {
    metric: tuple(
        replace(metric, name=f"vllm:{name}", labels=tuple(_LABELS.get(label, label) for label in metric.labels))
        for name in names
    )
    for metric, names in _NAMES.items()
}


def with_vllm_names(samples: Iterable[Sample], query: Mapping[str, Sequence[str]]) -> Iterator[Sample]:
    """Yields the samples and, with `names=vllm` in the query, those that vLLM has too once more under vLLM's names."""
    found = list(samples)
    yield from found
    if "vllm" in query.get("names", ()):
        yield from (replace(sample, metric=name) for sample in found for name in _RENAMED.get(sample.metric, ()))
