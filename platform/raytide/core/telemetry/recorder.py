"""Counters and histograms that a process keeps. One thread changes them, so that an observation takes no lock."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator

from raytide.core.telemetry.metrics import Exemplar, HistogramSample, Metric, MetricSample


class HistogramRecorder:
    """One histogram. Its labels are given when it is read."""

    __slots__ = ("_counts", "_exemplars", "_metric", "_sum")

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1, trace_id: str = "") -> None:
        """Counts a value; of several equal ones all at once. A traced one becomes its bucket's exemplar."""
        bucket = bisect_left(self._metric.buckets, value)
        self._counts[bucket] += times
        self._sum += value * times
        if trace_id:
            self._exemplars[bucket] = Exemplar(trace_id, value, time.time())

    def sample(self, *labels: str) -> HistogramSample:
        return HistogramSample(self._metric, tuple(self._counts), self._sum, labels, dict(self._exemplars))


class ValueRecorder:
    """A counter or gauge, with a value for each set of its last labels. Its first labels are given when it is read."""

    __slots__ = ("_metric", "_values")

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._values: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def set(self, *labels: str, value: float) -> None:
        self._values[labels] = value

    def samples(self, *first_labels: str) -> Iterator[MetricSample]:
        for labels, value in self._values.items():
            yield MetricSample(self._metric, value, (*first_labels, *labels))
