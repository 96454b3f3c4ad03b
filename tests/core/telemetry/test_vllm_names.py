"""vLLM's names beside raytide's: those that its dashboards query are there, with its labels."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from raytide.actors.engine.types import DiskCounts, DraftCounts, EngineStats, Timing
from raytide.actors.serving.metrics import ServingMetrics, engine_samples
from raytide.core.telemetry.metrics import render
from raytide.core.telemetry.vllm_names import with_vllm_names

VLLM = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_hits_total",
    "num_preemptions_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket",
    "request_inference_time_seconds_bucket",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
}


def test_vllm_s_dashboards_find_their_series_when_they_are_asked_for() -> None:
    metrics = ServingMetrics("chat", "2")
    track = metrics.track("chat")
    track.tokens(0, 3)
    track.ended(["stop"], [Timing(0.1, 0.2, 0.3)], prompt_tokens=5, generated=3)
    stats = EngineStats(running=4, speculation=(DraftCounts("ngram", 1, 4, 3),), disk=DiskCounts(hit_tokens=8))
    samples = [*metrics.samples(), *engine_samples(stats, "chat", "2", "r1")]
    assert list(with_vllm_names(samples, {})) == samples
    page = render(with_vllm_names(samples, {"names": ["vllm"]})).decode()
    found = {
        sample.name.removeprefix("vllm:"): sample.labels
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    assert found.keys() >= VLLM
    assert found["num_requests_running"] == {"model_name": "chat", "engine": "r1", "revision": "2"}
    assert found["request_success_total"] == {"model_name": "chat", "finished_reason": "stop"}
