"""Serving by the roofline: published KV sizes and floors, and what an SLO does to a fleet."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.objects.endpoint import Speed
from raytide.sizing.devices import DEVICES
from raytide.sizing.model_shape import MODELS
from raytide.sizing.serving import ServingLoad, decode_seconds, kv_room, plan_replicas, prefill_seconds

H100, A100 = DEVICES["H100"], DEVICES["A100"]
LLAMA = MODELS["llama-3-8b"]


@pytest.mark.parametrize(
    ("model", "nbytes"),
    [("llama-2-7b", 524_288), ("llama-3-8b", 131_072), ("llama-3-70b", 327_680), ("llama-3-405b", 516_096)],
)
def test_kv_bytes_of_a_token(model: str, nbytes: int) -> None:
    assert MODELS[model].kv_bytes_per_token() == nbytes


def test_floors_at_full_efficiency() -> None:
    """8B on an H100: 4.79 ms a token at batch 1, 16.2 ms for 1,000 prompt tokens; 70B on two A100: 33.8 ms."""
    ideal = {"memory_efficiency": 1.0, "compute_efficiency": 1.0, "host_s": 0.0}
    assert decode_seconds(LLAMA, 1, 0, H100, **ideal) * 1e3 == pytest.approx(4.79, abs=0.005)
    assert prefill_seconds(LLAMA, 1000, H100, efficiency=1.0) * 1e3 == pytest.approx(16.2, rel=0.025)
    assert decode_seconds(MODELS["llama-3-70b"], 1, 0, A100, 2, **ideal) * 1e3 == pytest.approx(33.8, rel=0.1)


@pytest.mark.parametrize(("device", "batch"), [(H100, 295), (A100, 153)])
def test_decoding_is_compute_bound_from_peak_over_bandwidth(device: object, batch: int) -> None:
    from raytide.sizing.devices import Accelerator

    assert isinstance(device, Accelerator)
    assert device.peak_flops("bf16") / device.bandwidth == pytest.approx(batch, abs=1)
    ideal = {"memory_efficiency": 1.0, "compute_efficiency": 1.0, "host_s": 0.0}
    below, above = (decode_seconds(LLAMA, size, 0, device, **ideal) for size in (batch - 5, batch + 50))
    assert below == pytest.approx(decode_seconds(LLAMA, 1, 0, device, **ideal))
    assert above > 1.1 * below


def test_layers_with_a_window_compute_and_read_no_more_than_it() -> None:
    """Half of the layers see 1,000 tokens of 8,000."""
    windowed, tokens = replace(LLAMA, windows=(1000,) * 16), 8000
    seen = sum(min(at, 1000) for at in range(1, tokens + 1)) / sum(range(1, tokens + 1))
    attention_s = 2 * 32 * 4096 * tokens**2 / H100.peak_flops("bf16")
    whole, less = (prefill_seconds(each, tokens, H100, efficiency=1.0) for each in (LLAMA, windowed))
    assert whole - less == pytest.approx(attention_s * (1 - seen) / 2, rel=0.01)
    assert prefill_seconds(windowed, 1000, H100) == prefill_seconds(LLAMA, 1000, H100)
    assert decode_seconds(windowed, 64, tokens, H100) == pytest.approx(decode_seconds(LLAMA, 64, 4500, H100))
    load = ServingLoad(20, tokens, 300)
    plans = [plan_replicas(each, load, H100, 1) for each in (windowed, LLAMA)]
    assert plans[0] is not None and plans[1] is not None
    assert plans[0].slots == plans[1].slots, "the KV of all tokens is kept"
    assert plans[0].requests_per_s > plans[1].requests_per_s


def test_a_plan_feeds_the_autoscaler() -> None:
    load = ServingLoad(20, 1000, 300, slo_ttft_s=1.0, slo_tpot_s=0.03)
    found = plan_replicas(LLAMA, load, H100, 1, 2.0)
    assert found is not None
    assert isinstance(found.speed, Speed)
    assert found.replicas * found.requests_per_s >= load.requests_per_s
    assert (found.replicas - 1) * found.requests_per_s < load.requests_per_s
    assert found.tpot_s <= 0.03
    assert found.usd_per_h == found.replicas * 2.0
    assert found.speed.tpot_ms == pytest.approx(found.tpot_s * 1e3)


def test_a_tighter_slo_takes_slots_and_then_everything() -> None:
    loose, tight = (plan_replicas(LLAMA, ServingLoad(20, 1000, 300, slo_tpot_s=each), H100, 1) for each in (0.05, 0.01))
    assert loose is not None
    assert tight is not None
    assert tight.slots < loose.slots
    assert tight.replicas >= loose.replicas
    assert tight.binding in ("time between tokens", "prefill")
    assert plan_replicas(LLAMA, ServingLoad(20, 1000, 300, slo_tpot_s=0.001), H100, 1) is None


def test_kv_of_int8_gives_nearly_twice_the_sequences() -> None:
    wide, narrow = (
        plan_replicas(LLAMA, ServingLoad(20, 1000, 300, kv_dtype=each), H100, 1) for each in ("auto", "int8")
    )
    assert wide is not None and narrow is not None
    assert narrow.kv_bytes_per_token == wide.kv_bytes_per_token * (LLAMA.head_dim + 4) / (2 * LLAMA.head_dim)
    assert 1.9 * wide.slots < narrow.slots < 2 * wide.slots
    assert plan_replicas(LLAMA, ServingLoad(20, 100_000, 300, slo_ttft_s=0.1), H100, 1) is None


def test_a_model_that_does_not_fit_has_no_room() -> None:
    assert kv_room(MODELS["llama-3-70b"], H100, 1) < 0
    assert plan_replicas(MODELS["llama-3-70b"], ServingLoad(1, 1000, 300), H100, 1) is None
    assert plan_replicas(MODELS["llama-3-70b"], ServingLoad(1, 1000, 300), H100, 4) is not None


@given(st.floats(0.1, 500), st.floats(1.0, 3.0))
def test_more_requests_never_need_fewer_replicas(rate: float, factor: float) -> None:
    few, many = (plan_replicas(LLAMA, ServingLoad(each, 1000, 300), H100, 1) for each in (rate, rate * factor))
    assert few is not None
    assert many is not None
    assert many.replicas >= few.replicas
