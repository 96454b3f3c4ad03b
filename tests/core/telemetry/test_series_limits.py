"""Hostile names: 10,000 of them for each label neither fill a page nor break it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from raytide.core.telemetry.catalogue import METRICS
from raytide.core.telemetry.metrics import HistogramSample, Metric, MetricSample, Sample, render
from raytide.core.telemetry.series_limits import (
    MOST_CHARS,
    MOST_OTHER_VALUES,
    MOST_SERIES,
    MOST_VALUES,
    OTHER,
    SeriesLimits,
)

COUNTER = Metric("raytide_test", "counter", "A test.", labels=("endpoint", "how"))
GAUGE = Metric("raytide_test_ratio", "gauge", "A test.", labels=("endpoint",))
HISTOGRAM = Metric("raytide_test_seconds", "histogram", "A test.", ("endpoint",), (0.1, 1.0))

HOSTILE = [f'{n}"}}\n\\ evil{{x="y"}} \U0001f30a\ud800 {"x" * (n % 400)}' for n in range(10_000)]


def one(metric: Metric, labels: tuple[str, ...], value: float = 1.0) -> Sample:
    if metric.type == "histogram":
        return HistogramSample(metric, [1] + [0] * len(metric.buckets), value, labels)
    return MetricSample(metric, value, labels)


LABELS = {(label, metric.type): metric for metric in METRICS.values() for label in metric.labels}
"""A metric of each type for every label that it has."""


@pytest.mark.parametrize(("label", "kind"), sorted(LABELS))
def test_hostile_names_in_every_label_leave_a_page_that_prometheus_reads(label: str, kind: str) -> None:
    metric = LABELS[label, kind]  # type: ignore[index]
    page = SeriesLimits().apply(
        one(metric, tuple(name if each == label else "x" for each in metric.labels)) for name in HOSTILE
    )
    most = MOST_VALUES.get(label, MOST_OTHER_VALUES)
    assert len(page) == min(most, MOST_SERIES) + (metric.type != "gauge")
    assert all(len(value) <= MOST_CHARS for sample in page for value in sample.labels)
    if metric.type == "counter":
        assert sum(sample.value for sample in page if isinstance(sample, MetricSample)) == len(HOSTILE)
    if most <= MOST_OTHER_VALUES:
        (family,) = text_string_to_metric_families(render(page).decode())
        assert len({tuple(sorted(sample.labels.items())) for sample in family.samples}) >= len(page)


def test_names_that_are_hostile_in_two_labels_are_bounded_by_the_number_of_series() -> None:
    page = SeriesLimits(most_series=50).apply(one(COUNTER, (f"e{n % 100}", f"h{n // 100}")) for n in range(10_000))
    assert len(page) == 51
    assert sum(sample.value for sample in page if isinstance(sample, MetricSample)) == 10_000


@given(st.lists(st.sets(st.integers(0, 12)), max_size=12))
def test_no_value_moves_between_the_page_and_other_while_it_is_there(pages: list[set[int]]) -> None:
    limits = SeriesLimits({"endpoint": 4})
    named_before: set[str] = set()
    before: set[str] = set()
    for page in pages:
        values = {str(n) for n in page}
        shown = {sample.labels[0] for sample in limits.apply(one(GAUGE, (value,)) for value in sorted(values))}
        assert len(shown) <= 4
        assert shown <= values
        assert (before & values) - named_before == (before & values) - shown
        before, named_before = values, shown


def test_what_is_beyond_the_limit_is_added_up_and_of_gauges_left_out() -> None:
    limits = SeriesLimits({"endpoint": 1})
    samples = [one(metric, labels, 2.0) for metric in (GAUGE, HISTOGRAM) for labels in (("a",), ("b",), ("c",))]
    page = limits.apply([*samples, *(one(COUNTER, (name, "x"), 3.0) for name in "abc")])
    values = {(sample.metric.name, sample.labels): sample for sample in page}
    assert values.keys() == {
        (GAUGE.name, ("a",)),
        (HISTOGRAM.name, ("a",)),
        (HISTOGRAM.name, (OTHER,)),
        (COUNTER.name, ("a", "x")),
        (COUNTER.name, (OTHER, "x")),
    }
    assert values[COUNTER.name, (OTHER, "x")] == MetricSample(COUNTER, 6.0, (OTHER, "x"))
    assert values[HISTOGRAM.name, (OTHER,)] == HistogramSample(HISTOGRAM, [2, 0, 0], 4.0, (OTHER,))


def test_a_user_s_own_other_is_a_value_as_any() -> None:
    assert SeriesLimits({"endpoint": 1}).apply([one(GAUGE, (OTHER,))]) == [one(GAUGE, (OTHER,))]
