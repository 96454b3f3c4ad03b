"""Aliases of raytide's metrics, for existing dashboards. `/metrics?names=vllm` adds the names that vLLM's server uses.
`names=gen_ai` adds the names of OpenTelemetry's conventions for generative AI, as its Prometheus exporter writes
them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raytide.core.telemetry.catalogue import application, model
from raytide.core.telemetry.metrics import Metric, Sample

_VLLM: Mapping[Metric, tuple[str, ...]] = {
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
_VLLM_LABELS = {"endpoint": "model_name", "replica": "engine", "reason": "finished_reason"}
_GEN_AI: Mapping[Metric, tuple[str, Mapping[str, str]]] = {
    application.REQUEST_SECONDS: ("server_request_duration_seconds", {}),
    application.FIRST_TOKEN_SECONDS: ("server_time_to_first_token_seconds", {}),
    application.INTER_TOKEN_SECONDS: ("server_time_per_output_token_seconds", {}),
    application.REQUEST_PROMPT_TOKENS: ("client_token_usage", {"gen_ai_token_type": "input"}),  # nosec B105
    application.REQUEST_GENERATED_TOKENS: ("client_token_usage", {"gen_ai_token_type": "output"}),  # nosec B105
}
_GEN_AI_LABELS = {"endpoint": "gen_ai_request_model"}
_GEN_AI_HELP = {"client_token_usage": "Tokens of a request"}  # tokens of text  # nosec B105


@dataclass(frozen=True, slots=True)
class _Alias:
    metric: Metric
    values: tuple[str, ...] = ()
    """The values of the labels that raytide's metric does not have."""


def _alias(metric: Metric, name: str, labels: Mapping[str, str], more: Mapping[str, str], help: str = "") -> _Alias:
    renamed = (*(labels.get(label, label) for label in metric.labels), *more)
    return _Alias(replace(metric, name=name, labels=renamed, help=help or metric.help), tuple(more.values()))


_ALIASES: Mapping[str, Mapping[Metric, tuple[_Alias, ...]]] = {
    "vllm": {
        metric: tuple(_alias(metric, f"vllm:{name}", _VLLM_LABELS, {}) for name in names)
        for metric, names in _VLLM.items()
    },
    "gen_ai": {
        metric: (
            _alias(
                metric,
                f"gen_ai_{name}",
                _GEN_AI_LABELS,
                {"gen_ai_provider_name": "raytide", **more},
                _GEN_AI_HELP.get(name, ""),
            ),
        )
        for metric, (name, more) in _GEN_AI.items()
    },
}


def with_other_names(samples: Iterable[Sample], query: Mapping[str, Sequence[str]]) -> Iterator[Sample]:
    """Yields all samples, and then copies of samples under their aliases. `query` contains the parameters of the
    request. Its parameter `names` chooses the sets of aliases.
    """
    found = list(samples)
    yield from found
    for names in dict.fromkeys(query.get("names", ())):
        aliases = _ALIASES.get(names, {})
        for sample in found:
            for alias in aliases.get(sample.metric, ()):
                yield replace(sample, metric=alias.metric, labels=(*sample.labels, *alias.values))
