"""Other names beside raytide's: those that vLLM's dashboards query, and those of OpenTelemetry's conventions."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from raytide.actors.engine.types import DiskCounts, DraftCounts, EngineStats, Timing
from raytide.actors.serving.metrics import ServingMetrics, engine_samples
from raytide.core.telemetry.metrics import Sample, render
from raytide.core.telemetry.other_names import with_other_names

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


def served() -> list[Sample]:
    metrics = ServingMetrics("chat", "2")
    track = metrics.track("chat")
    track.tokens(0, 3)
    track.ended(["stop"], [Timing(0.1, 0.2, 0.3)], prompt_tokens=5, generated=3)
    stats = EngineStats(running=4, speculation=(DraftCounts("ngram", 1, 4, 3),), disk=DiskCounts(hit_tokens=8))
    return [*metrics.samples(), *engine_samples(stats, "chat", "2", "r1")]


def test_vllm_s_dashboards_find_their_series_when_they_are_asked_for() -> None:
    samples = served()
    assert list(with_other_names(samples, {})) == list(with_other_names(samples, {"names": ["other"]})) == samples
    page = render(with_other_names(samples, {"names": ["vllm"]})).decode()
    found = {
        sample.name.removeprefix("vllm:"): sample.labels
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    }
    assert found.keys() >= VLLM
    assert found["num_requests_running"] == {"model_name": "chat", "engine": "r1", "revision": "2"}
    assert found["request_success_total"] == {"model_name": "chat", "finished_reason": "stop"}


def test_opentelemetry_s_names_of_generative_ai_have_its_labels() -> None:
    page = render(with_other_names(served(), {"names": ["gen_ai"]})).decode()
    families = [family for family in text_string_to_metric_families(page) if family.name.startswith("gen_ai_")]
    assert sorted(family.name for family in families) == [
        "gen_ai_client_token_usage",
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_server_time_to_first_token_seconds",
    ]
    whose = {"gen_ai_request_model": "chat", "gen_ai_provider_name": "raytide", "revision": "2"}
    sums = {
        (sample.name, sample.labels.get("gen_ai_token_type")): (sample.value, whose.items() <= sample.labels.items())
        for family in families
        for sample in family.samples
        if sample.name.endswith(("token_usage_sum", "first_token_seconds_count"))
    }
    assert sums == {
        ("gen_ai_client_token_usage_sum", "input"): (5.0, True),
        ("gen_ai_client_token_usage_sum", "output"): (3.0, True),
        ("gen_ai_server_time_to_first_token_seconds_count", None): (1.0, True),
    }
