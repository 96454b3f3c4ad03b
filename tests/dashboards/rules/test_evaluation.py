"""raytide's evaluator gives what a real Prometheus gives on the same samples."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dashboards.prometheus_fixture import Prometheus, Stored, needs_prometheus, prometheus_over

from raytide.dashboards.rules.evaluation import Labels, Point, Vector, evaluate, matches
from raytide.dashboards.rules.expressions import (
    Absent,
    Aggregation,
    Arithmetic,
    Condition,
    Expression,
    Matcher,
    OverTime,
    OverTimeOp,
    PredictLinear,
    Quantile,
    Rate,
    Recorded,
    Selector,
    SetOperation,
    matching,
    to_promql,
)

BEGIN_S = 1_700_000_000.0
SPAN_S = 1800.0
BOUNDS = ("0.1", "0.5", "1", "5", "+Inf")
SIGNED_BOUNDS = ("-1", "0", "1", "+Inf")


class InMemory:
    """A SeriesSource over a dictionary."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def range(
        self, metric: str, where: Sequence[Matcher], start_s: float, end_s: float
    ) -> Iterable[tuple[Labels, Sequence[Point]]]:
        for labels, points in self._stored.get(metric, {}).items():
            if matches(dict(labels), where):
                yield labels, [point for point in points if start_s <= point[0] <= end_s]


def scraped(rng: random.Random) -> list[float]:
    """Times of scrapes: some on whole seconds, some with jitter, some with gaps, some that begin late or end early."""
    step_s = rng.choice([15.0, 30.0, 7.0])
    jitter_s = rng.choice([0.0, 5.0])
    begin_s = BEGIN_S + rng.choice([0.0, rng.uniform(0, SPAN_S / 2)])
    end_s = BEGIN_S + rng.choice([SPAN_S, rng.uniform(SPAN_S / 2, SPAN_S)])
    count = int((end_s - begin_s) / step_s)
    times = [begin_s + i * step_s + rng.uniform(0, jitter_s) for i in range(count) if rng.random() > 0.05]
    return sorted({round(time_s, 3) for time_s in times})


def counter(rng: random.Random) -> list[tuple[float, float]]:
    """A counter that grows at a changing pace, stands still at times, and is sometimes reset."""
    value, points = rng.choice([0.0, 3.0, 1e6]), []
    pace = rng.choice([0.0, 0.3, 40.0])
    for at_s in scraped(rng):
        if rng.random() < 0.02:
            value = 0.0
        if rng.random() < 0.05:
            pace = rng.choice([0.0, 0.3, 40.0])
        value += float(rng.randint(0, int(2 * pace) + 1)) if pace else 0.0
        points.append((at_s, value))
    return points


def gauge(rng: random.Random) -> list[tuple[float, float]]:
    if rng.random() < 0.1:
        return [(at_s, 2.5) for at_s in scraped(rng)]
    return [(at_s, math.nan if rng.random() < 0.02 else round(rng.gauss(1, 2), 3)) for at_s in scraped(rng)]


def histogram(rng: random.Random, bounds: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """Cumulative buckets; a few samples are missing, so that a higher bucket may seem to grow less."""
    counts = dict.fromkeys(bounds, 0.0)
    points: dict[str, list[tuple[float, float]]] = {bound: [] for bound in bounds}
    weights = [rng.random() for _ in bounds]
    for at_s in scraped(rng):
        for observed in rng.choices(range(len(bounds)), weights, k=rng.choice([0, 0, 5])):
            for bound in bounds[observed:]:
                counts[bound] += 1
        for bound in bounds:
            if rng.random() > 0.03:
                points[bound].append((at_s, counts[bound]))
    return points


def drawn_samples(seed: int) -> Stored:
    rng = random.Random(seed)
    names = ("c_total", "d_total", "g", "h_bucket", "signed_bucket")
    stored: dict[str, dict[Labels, list[tuple[float, float]]]] = {name: {} for name in names}
    for endpoint in ("chat", "code", 'odd "one"\\'):
        for zone in ("a", "b"):
            labels = (("endpoint", endpoint), ("zone", zone))
            stored["c_total"][labels] = counter(rng)
            stored["g"][labels] = gauge(rng)
            for name, bounds in (("h_bucket", BOUNDS), ("signed_bucket", SIGNED_BOUNDS)):
                for bound, points in histogram(rng, bounds).items():
                    stored[name][("endpoint", endpoint), ("le", bound), ("zone", zone)] = points
        stored["d_total"][("endpoint", endpoint), ("zone", "a")] = counter(rng)
    return stored


STORED = drawn_samples(17)

WINDOWS_S = (60, 300, 600)
STATISTICS: tuple[OverTimeOp, ...] = ("avg", "max", "min", "sum", "count", "last", "stddev", "changes", "increase")
QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
LEAVES: list[Expression] = [
    Selector("g"),
    *(Rate(Selector(name), window_s) for name in ("c_total", "d_total") for window_s in WINDOWS_S),
    *(
        OverTime(op, Selector(name), window_s)
        for op in STATISTICS
        for name in ("c_total", "g")
        for window_s in WINDOWS_S
    ),
    *(PredictLinear(Selector("g"), window_s, 3600) for window_s in WINDOWS_S),
    *(
        Quantile(q, Selector(name), 300, by)
        for q in QUANTILES
        for name in ("h", "signed")
        for by in ((), ("endpoint", "zone"))
    ),
    Absent(Selector("g", matching(zone="a"))),
]


def moments_on_edges(seed: int, count: int) -> list[float]:
    """Times at which a sample is exactly as old as a window or the lookback, or which no sample is near."""
    rng = random.Random(seed)
    times = [at_s for series in STORED.values() for points in series.values() for at_s, _ in points]
    ends = [points[-1][0] for series in STORED.values() for points in series.values()]
    edges = [
        rng.choice(rng.choice([times, ends])) + rng.choice([0.0, *WINDOWS_S, 299.999, 300.001]) for _ in range(count)
    ]
    return [round(at_s, 3) for at_s in (*edges, *(rng.uniform(BEGIN_S, BEGIN_S + SPAN_S) for _ in range(count)))]


windows = st.sampled_from(WINDOWS_S)
groupings = st.sampled_from([(), ("endpoint",), ("zone",), ("endpoint", "zone")])
selections = st.sampled_from(
    [
        (),
        matching(zone="a"),
        matching(endpoint=("chat", "code")),
        matching(endpoint='odd "one"\\'),
        (Matcher("zone", "!=", "a"),),
        (Matcher("endpoint", "!~", "c.*"), Matcher("zone", "=~", ".+")),
        matching(zone="nowhere"),
    ]
)
counters = st.builds(Selector, st.sampled_from(["c_total", "d_total"]), selections)
gauges = st.builds(Selector, st.just("g"), selections)
bounds = st.sampled_from([0.0, 0.5, 1.0, -2.0])
leaves: st.SearchStrategy[Expression] = st.one_of(
    counters,
    gauges,
    st.builds(Rate, counters, windows),
    st.builds(
        OverTime,
        st.sampled_from(STATISTICS),
        st.one_of(counters, gauges),
        windows,
    ),
    st.builds(PredictLinear, gauges, windows, st.sampled_from([60, 3600])),
    st.builds(
        Quantile,
        st.sampled_from([0.0, 0.5, 0.99, 1.0]),
        st.builds(Selector, st.just("h"), selections),
        windows,
        groupings,
    ),
    st.builds(Absent, st.one_of(counters, gauges)),
)


def larger(smaller: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(Aggregation, st.sampled_from(["sum", "max", "min", "avg", "count"]), smaller, groupings),
        st.builds(Arithmetic, smaller, st.sampled_from(["+", "-", "*", "/"]), st.one_of(bounds, smaller)),
        st.builds(Condition, smaller, st.sampled_from([">", "<", ">=", "<=", "==", "!="]), st.one_of(bounds, smaller)),
        st.builds(
            SetOperation, smaller, st.sampled_from(["and", "or", "unless"]), smaller, st.sampled_from([None, ("zone",)])
        ),
    )


expressions = st.recursive(leaves, larger, max_leaves=4)
moments = st.one_of(
    st.floats(BEGIN_S - 60, BEGIN_S + SPAN_S + 400).map(lambda at_s: round(at_s, 3)),
    st.integers(0, 120).map(lambda step: BEGIN_S + 15.0 * step),  # on the edge of a sample
)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus_over(tmp_path_factory.mktemp("prometheus"), STORED) as running:
        yield running


def assert_same(found: Vector, expected: Vector, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for labels, value in expected.items():
        assert found[labels] == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True), f"{what} at {labels}"


@needs_prometheus
@pytest.mark.parametrize("leaf", LEAVES, ids=to_promql)
def test_each_function_agrees_with_prometheus(prometheus: Prometheus, leaf: Expression) -> None:
    for at_s in moments_on_edges(5, 20):
        assert_same(evaluate(leaf, InMemory(STORED), at_s), prometheus.query(to_promql(leaf), at_s), f"at {at_s}")


@needs_prometheus
@given(expression=expressions, at_s=moments)
@settings(max_examples=300)
def test_every_tree_agrees_with_prometheus(prometheus: Prometheus, expression: Expression, at_s: float) -> None:
    promql = to_promql(expression)
    assert_same(evaluate(expression, InMemory(STORED), at_s), prometheus.query(promql, at_s), f"{promql} at {at_s}")


RISING: Stored = {"c_total": {(("zone", "a"),): [(BEGIN_S + 10 * i, 5.0 * i) for i in range(7)]}}


def test_a_rate_is_extrapolated_to_the_ends_of_its_window() -> None:
    rate = Rate(Selector("c_total"), 60)
    assert evaluate(rate, InMemory(RISING), BEGIN_S + 65) == {(("zone", "a"),): pytest.approx(0.5)}
    assert evaluate(rate, InMemory(RISING), BEGIN_S) == {}, "one sample is no rate"


def test_a_stale_marker_ends_a_series_at_once_and_no_rate() -> None:
    points: list[Point] = [*RISING["c_total"][(("zone", "a"),)], (BEGIN_S + 61, None)]
    source = InMemory({"c_total": {(("zone", "a"),): points}})
    assert evaluate(Selector("c_total"), source, BEGIN_S + 60) == {(("zone", "a"),): 30.0}
    assert evaluate(Selector("c_total"), source, BEGIN_S + 62) == {}
    assert evaluate(Absent(Selector("c_total", matching(zone="a"))), source, BEGIN_S + 62) == {(("zone", "a"),): 1.0}
    assert evaluate(Rate(Selector("c_total"), 60), source, BEGIN_S + 62) != {}


def test_what_was_recorded_is_computed_here() -> None:
    recorded = Recorded("zone:c:rate1m", Rate(Selector("c_total"), 60))
    assert to_promql(recorded) == "zone:c:rate1m"
    assert evaluate(recorded, InMemory(RISING), BEGIN_S + 65) == {(("zone", "a"),): pytest.approx(0.5)}
