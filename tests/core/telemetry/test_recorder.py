"""A recorded histogram has the page that prometheus_client gives it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from raytide.core.telemetry.catalogue.application import FIRST_TOKEN_SECONDS, REQUESTS
from raytide.core.telemetry.metrics import HistogramRecorder, Metric, MetricSample, ValueRecorder, render

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def series(page: bytes) -> Series:
    families = text_string_to_metric_families(page.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_a_histogram_s_page_is_that_of_prometheus_own_client(observations: list[tuple[float, int]]) -> None:
    metric = FIRST_TOKEN_SECONDS
    registry = CollectorRegistry()
    theirs = Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    child = theirs.labels("chat", "3")
    ours = HistogramRecorder(metric)
    for value, times in observations:
        ours.observe(value, times)
        for _ in range(times):
            child.observe(value)
    mine, expected = series(render([ours.sample("chat", "3")])), series(generate_latest(registry))
    assert mine.keys() == expected.keys()
    assert all(math.isclose(mine[key], expected[key], abs_tol=1e-9) for key in mine)


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from(["", "ab" * 16, "cd" * 16]))))
def test_a_bucket_s_exemplar_is_its_latest_traced_observation(observations: list[tuple[float, str]]) -> None:
    ours, latest = HistogramRecorder(FIRST_TOKEN_SECONDS), dict[float, tuple[str, float]]()
    bounds = [*FIRST_TOKEN_SECONDS.buckets, math.inf]
    for value, trace_id in observations:
        ours.observe(value, trace_id=trace_id)
        if trace_id:
            latest[float(next(bound for bound in bounds if value <= bound))] = (trace_id, value)
    counter = MetricSample(REQUESTS, 3, ("tide", "1", "chat", "ok", ""))
    page = render([ours.sample("chat", "3"), counter], openmetrics=True).decode()
    samples = [sample for family in parse_openmetrics(page) for sample in family.samples]
    found = {
        float(sample.labels["le"]): (sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for sample in samples
        if sample.exemplar is not None
    }
    assert found == latest
    assert (samples[-1].name, samples[-1].value) == ("raytide_requests_total", 3)


def test_a_counter_adds_by_its_last_labels_and_its_first_ones_are_given_when_it_is_read() -> None:
    counter = ValueRecorder(REQUESTS)
    counter.add("chat", "ok", "")
    counter.add("chat", "ok", "", amount=2)
    counter.add("chat", "error", "engine")
    assert list(counter.samples("tide", "1")) == [
        MetricSample(REQUESTS, 3, ("tide", "1", "chat", "ok", "")),
        MetricSample(REQUESTS, 1, ("tide", "1", "chat", "error", "engine")),
    ]


@given(st.text(), st.text(), st.floats())
def test_any_text_and_any_number_is_read_back_as_it_was(help: str, value: str, number: float) -> None:
    metric = Metric("raytide_test", "gauge", help, labels=("endpoint",))
    ((key, found),) = series(render([MetricSample(metric, number, (value,))])).items()
    assert key == ("raytide_test", (("endpoint", value.encode(errors="replace").decode()),))
    assert found == number or (math.isnan(found) and math.isnan(number))
