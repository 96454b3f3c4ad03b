"""Anomalies: robust scores that say what they compare with, and are quiet on little data."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.dashboards.alerts.service import ANOMALIES_FILE
from raytide.dashboards.history.points import label_set
from raytide.dashboards.history.reader import HistoryReader
from raytide.dashboards.history.writer import HistoryWriter
from raytide.dashboards.monitor.anomalies import LEAST_VALUES, STEP_S, Anomalies, robust_score

NOW_S = 1_700_000_000.0 - 1_700_000_000.0 % 600
earlier_values = st.lists(st.floats(1, 100), min_size=LEAST_VALUES, max_size=100)


@given(st.lists(st.floats(-1e6, 1e6), max_size=LEAST_VALUES - 1), st.floats(-1e9, 1e9))
def test_it_is_quiet_on_little_data(earlier: list[float], value: float) -> None:
    assert robust_score(value, earlier)[0] == 0.0


@given(earlier_values, st.floats(0.001, 1000))
def test_the_unit_of_a_value_does_not_matter(earlier: list[float], unit: float) -> None:
    score, _, _ = robust_score(150.0, earlier)
    assert robust_score(150.0 * unit, [each * unit for each in earlier])[0] == pytest.approx(score, rel=1e-6)


@given(earlier_values, st.floats(0, 1000), st.floats(0, 1000))
def test_a_larger_value_never_has_a_smaller_score(earlier: list[float], one: float, more: float) -> None:
    assert robust_score(one + more, earlier)[0] >= robust_score(one, earlier)[0]


@given(st.integers(0, 2**32), st.floats(1e3, 1e9))
def test_a_third_of_outliers_does_not_hide_a_new_one(seed: int, outlier: float) -> None:
    chance = random.Random(seed)
    usual = [10.0 + chance.gauss(0, 1) for _ in range(60)]
    score, _, _ = robust_score(30.0, usual + [outlier] * 25)
    assert score > 4
    assert abs(robust_score(10.5, usual + [outlier] * 25)[0]) < 2.5


def test_a_constant_is_usual_and_a_jump_of_it_is_not() -> None:
    assert robust_score(5.0, [5.0] * 50) == (0.0, 5.0, 0.0)
    assert robust_score(7.0, [5.0] * 50)[0] == pytest.approx(8.0)
    assert robust_score(0.0, [0.0] * 50)[0] == 0.0


def test_the_cost_and_latency_of_the_history_are_scored_and_explained(tmp_path: Path) -> None:
    history = HistoryWriter(tmp_path / "h", low_bytes=0)
    price = history.series("raytide_price_usd_per_hour", label_set({"type": "a", "market": "spot"}), False)
    buckets = {
        le: history.series(
            "raytide_time_to_first_token_seconds_bucket", label_set({"endpoint": "chat", "le": le}), True
        )
        for le in ("0.1", "1.0", "+Inf")
    }
    counts, steps = dict.fromkeys(buckets, 0.0), 60
    for step in range(2 * steps + 1):
        is_slow = step > 2 * steps - 4
        for le in counts:
            counts[le] += 0.0 if is_slow and le == "0.1" else 10.0
        points = [(series, counts[le]) for le, series in buckets.items()]
        history.write(NOW_S + STEP_S / 2 * step, [(price, 40.0 if is_slow else 10.0 + step % 2), *points])
    end_s = NOW_S + STEP_S * steps
    anomalies = Anomalies(HistoryReader(tmp_path / "h"), 7.0, tmp_path, lambda: end_s)
    anomalies.look()
    found = {each.signal: each for each in anomalies.found}
    assert found["cost"].score > 4
    assert found["cost"].value == 40.0
    assert found["cost"].n >= LEAST_VALUES
    assert found["latency"].subject == "chat"
    assert found["latency"].value > 5 * found["latency"].median
    assert found["latency"].score > 4
    written = json.loads((tmp_path / ANOMALIES_FILE).read_text())["signals"]
    assert {"score", "median", "mad", "n"} <= written[0].keys()
