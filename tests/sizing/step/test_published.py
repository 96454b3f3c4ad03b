"""Published training times and utilizations."""

from __future__ import annotations

import pytest

from raytide.sizing.step.published import (
    korthikanti_model_flops,
    megatron_days,
    megatron_flops_per_token,
    megatron_parameters,
    narayanan_days,
    palm_mfu,
)
from raytide.sizing.step.step_time import bubble_ratio, bubble_share


@pytest.mark.parametrize(
    ("layers", "width", "devices", "tflops", "days", "printed"),
    [
        (96, 12288, 384, 153, 84.7, 84),
        (96, 12288, 768, 149, 43.5, 43),
        (96, 12288, 1536, 141, 23.0, 23),
        (105, 20480, 560, 171, 156.1, 156),
        (105, 20480, 1120, 167, 79.9, 80),
        (105, 20480, 2240, 159, 42.0, 42),
    ],
)
def test_megatrons_days_for_300e9_tokens(
    layers: int, width: int, devices: int, tflops: float, days: float, printed: float
) -> None:
    """arXiv 2104.04473, table 2."""
    found = megatron_days(300e9, megatron_flops_per_token(layers, width), devices, tflops)
    assert found == pytest.approx(days, abs=0.06)
    assert found == pytest.approx(printed, rel=0.012)


def test_narayanans_short_form() -> None:
    assert narayanan_days(175e9, 300e9, 1024, 140) == pytest.approx(33.9, abs=0.05)
    assert narayanan_days(1008e9, 450e9, 3072, 163) == pytest.approx(83.9, abs=0.05)


@pytest.mark.parametrize(
    ("layers", "width", "billions"),
    [
        (24, 2304, 1.7),
        (36, 4096, 7.5),
        (96, 12288, 174.6),
        (80, 12288, 145.6),
        (105, 20480, 529.6),
        (128, 25600, 1008.0),
    ],
)
def test_megatrons_parameters(layers: int, width: int, billions: float) -> None:
    assert megatron_parameters(layers, width) / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("layers", "width", "batch", "devices", "seconds", "mfu"),
    [
        (48, 6144, 4, 8, 1.10, 0.417),
        (96, 12288, 64, 64, 13.75, 0.514),
        (105, 20480, 280, 280, 37.83, 0.560),
        (128, 25600, 512, 512, 71.49, 0.563),
    ],
)
def test_korthikantis_utilization(
    layers: int, width: int, batch: int, devices: int, seconds: float, mfu: float
) -> None:
    """arXiv 2205.05198, table 5, on A100 of 312 TFLOP/s; the paper prints 41.5, 51.4, 56.0 and 56.3 %."""
    found = korthikanti_model_flops(layers, width, batch) / seconds / devices / 312e12
    assert found == pytest.approx(mfu, abs=5e-4)


def test_palms_utilization() -> None:
    """arXiv 2204.02311, table 3: 540B on 6,144 TPU v4, without and with attention."""
    assert palm_mfu(238_300, 6144, 275, 540.35e9) == pytest.approx(0.457, abs=5e-4)
    attention = {"layers": 118, "attention_width": 48 * 256, "seq_len": 2048}
    assert palm_mfu(238_300, 6144, 275, 540.35e9, **attention) == pytest.approx(0.462, abs=5e-4)


def test_bubbles() -> None:
    assert bubble_ratio(8, 32) == pytest.approx(0.219, abs=5e-4)
    assert bubble_share(8, 32) == pytest.approx(0.179, abs=5e-4)
    assert bubble_share(8, 32, 3) == pytest.approx(0.068, abs=5e-4)
