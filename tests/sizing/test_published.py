"""The planner's own counts against published sizes, training times and utilizations."""

from __future__ import annotations

import pytest
from tests.sizing.published_models import gpt

from raytide.sizing.model_shape import ModelShape
from raytide.sizing.step_time import bubble_ratio

DAY_S = 86_400.0


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
    """arXiv 2104.04473, table 2. Its equation 3 counts a whole recomputation of the layers, and not of the head."""
    model = gpt(layers, width, 128)
    head = 6.0 * model.vocab * model.width
    recomputed = (model.flops_per_token(2048) - head) * 4 / 3 + head
    found = 300e9 * recomputed / (devices * tflops * 1e12) / DAY_S
    assert found == pytest.approx(days, abs=0.06)
    assert found == pytest.approx(printed, rel=0.012)


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
    """Equation 2 there, 12 L h^2 (1 + 13/(12h) + (V+s)/(12 L h)), has no last norm."""
    found = gpt(layers, width, 32).parameters
    formula = 12.0 * layers * width**2 * (1.0 + 13.0 / (12.0 * width) + (51_200 + 2048) / (12.0 * layers * width))
    assert found - 2 * width == pytest.approx(formula, rel=1e-12)
    assert found / 1e9 == pytest.approx(billions, abs=0.06)


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
    flops = gpt(layers, width, 64).flops_per_token(2048) * batch * 2048
    appendix = 72.0 * batch * layers * 2048 * width**2
    appendix *= 1.0 + 2048 / (6.0 * width) + 51_200 / (12.0 * layers * width)
    assert flops == pytest.approx(appendix, rel=1e-12)
    assert flops / seconds / devices / 312e12 == pytest.approx(mfu, abs=5e-4)


def test_palms_utilization() -> None:
    """arXiv 2204.02311, table 3: 540B on 6,144 TPU v4; one head of keys and values, and a tied head."""
    palm = ModelShape(
        layers=118, width=18_432, heads=48, kv_heads=1, head_dim=256, ffn=73_728, vocab=256_000, gated=True, tied=True
    )
    assert palm.parameters / 1e9 == pytest.approx(540.35, abs=0.05)
    assert 238_300 * palm.flops_per_token(2048) / (6144 * 275e12) == pytest.approx(0.462, abs=5e-4)


def test_bubbles() -> None:
    assert bubble_ratio(8, 32) == pytest.approx(0.219, abs=5e-4)
    assert bubble_ratio(8, 32, 3) == pytest.approx(0.0729, abs=5e-5)
