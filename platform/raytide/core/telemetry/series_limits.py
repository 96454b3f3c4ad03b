"""Limits the number of series on a metrics page, even if users choose very many names for endpoints, jobs and the
like.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from raytide.core.telemetry.metrics import HistogramSample, Metric, MetricSample, Sample

OTHER = "other"
"""The value that replaces values of a label beyond its limit."""
MOST_SERIES = 5000
"""The most series of one metric on one page; a histogram counts as one series."""
MOST_CHARS = 200
"""The most characters of a label's value."""
MOST_VALUES: Mapping[str, int] = {
    "endpoint": 500,
    "revision": 1000,
    "replica": 1000,
    "team": 200,
    "key": 200,
    "job": 1000,
    "name": 200,
    "node": 1000,
    "Hostname": 1000,
    "UUID": 5000,
    "subject": 500,
    "instance": 2000,
    "alert": 200,
    "probe": 200,
    "rank": 1000,
    "address": 200,
    "type": 200,
    "zone": 200,
}
"""The most values of a label on one page. Revisions are limited over all endpoints together, since each endpoint
numbers its own.
"""
MOST_OTHER_VALUES = 100
"""The most values of each label that `MOST_VALUES` does not name; these values come from code, not from users."""


class SeriesLimits:
    """Limits how many values each label has on one page.

    The first values of a label are kept, up to the label's limit. Counters and histograms with later values are
    added up under the value `other`. Gauges with later values are left out, because ratios and prices do not add up.
    Counters would jump if a value changed between its own series and `other`. So each value keeps its place as long
    as it occurs on every page. A value that is missing on one page is treated as new when it returns.
    """

    def __init__(self, most_values: Mapping[str, int] = MOST_VALUES, most_series: int = MOST_SERIES) -> None:
        self._most_values, self._most_series = most_values, most_series
        self._names: dict[str, dict[str, str | None]] = {}
        """For each label, the value on the page that stands for each original value; None for values beyond the
        limit."""

    def apply(self, samples: Iterable[Sample]) -> list[Sample]:
        """Applies the limits to the samples of one page, and returns the result. Counters and histograms beyond the
        limits are summed under the label value OTHER. Gauges beyond the limits are left out.
        """
        found = list(samples)
        self._names = self._named(found)
        kept: dict[tuple[Metric, tuple[str, ...]], Sample] = {}
        series: Counter[Metric] = Counter()
        for sample in found:
            metric = sample.metric
            names = [self._names[label][value] for label, value in zip(metric.labels, sample.labels, strict=True)]
            labels = tuple(OTHER if name is None else name for name in names)
            is_beyond = None in names
            if series[metric] >= self._most_series and (metric, labels) not in kept:
                labels, is_beyond = (OTHER,) * len(labels), True
            if is_beyond and metric.type == "gauge":
                continue
            before = kept.get((metric, labels))
            series[metric] += before is None
            kept[metric, labels] = replace(sample, labels=labels) if before is None else _sum(before, sample)
        return list(kept.values())

    def _named(self, samples: Iterable[Sample]) -> dict[str, dict[str, str | None]]:
        """Returns the values on this page for each label's original values. Values that were on the last page are
        kept."""
        values: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for sample in samples:
            for label, value in zip(sample.metric.labels, sample.labels, strict=True):
                values[label][value] = None
        found = {}
        for label, new in values.items():
            before = self._names.get(label, {})
            names = {value: before[value] for value in new if value in before}
            room = self._most_values.get(label, MOST_OTHER_VALUES) - sum(name is not None for name in names.values())
            for value in new:
                if value not in names:
                    names[value] = value[:MOST_CHARS] if room > 0 else None
                    room -= 1
            found[label] = names
        return found


def _sum(one: Sample, other: Sample) -> Sample:
    """Returns the sum of two samples of a counter or histogram; for a gauge, the first sample."""
    if isinstance(one, HistogramSample) and isinstance(other, HistogramSample):
        counts = [a + b for a, b in zip(one.counts, other.counts, strict=True)]
        return replace(one, counts=counts, sum=one.sum + other.sum)
    if isinstance(one, MetricSample) and isinstance(other, MetricSample) and one.metric.type == "counter":
        return replace(one, value=one.value + other.value)
    return one
