"""The types of metrics and samples, their text in Prometheus' format, and the recorders that hold a process's counts.

`raytide.core.telemetry.catalogue` declares all metrics. The text is not written by prometheus_client, because that
would take 70 ms for a page of 50 endpoints, and stop a gateway's event loop for that time.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

MetricType = Literal["gauge", "counter", "histogram"]
Layer = Literal["client", "application", "model", "infrastructure", "training", "queue", "cost", "monitoring"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""The content type of OpenMetrics, the only format with exemplars."""
_UNITS = {"seconds", "ratio", "tokens", "bytes", "usd", "watts", "joules"}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of a metric. A counter is declared without `_total`, and exposed with it."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """The upper bounds of a histogram's buckets, without infinity."""
    unit: str = ""
    """The unit in the plural: `seconds`, `tokens`, `ratio` (0 to 1), `usd`; empty for a count."""

    @property
    def exposed_name(self) -> str:
        """The metric's name in queries. A counter's name ends in `_total`. A histogram's name does not include the
        suffixes `_bucket`, `_sum` and `_count`."""
        return f"{self.name}_total" if self.type == "counter" else self.name


def gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "gauge", help, labels, unit=_unit_in(name))


def counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, "counter", help, labels, unit=_unit_in(name))


def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(name, "histogram", help, labels, buckets, unit=_unit_in(name))


def _unit_in(name: str) -> str:
    """Returns the unit that Prometheus expects for a metric's name: `tokens` for `raytide_job_tokens_per_second`."""
    return next((word for word in name.split("_") if word in _UNITS), "")


@dataclass(frozen=True, slots=True)
class MetricSample:
    """The value of a gauge or counter for one set of labels."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """The values of the metric's labels, in order."""


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A traced request that serves as an example of the observations in one bucket of a histogram."""

    trace_id: str
    value: float
    at_s: float


@dataclass(frozen=True, slots=True)
class HistogramSample:
    """One histogram: the number of observations in each bucket, not cumulated. The last bucket has no upper bound."""

    metric: Metric
    counts: Sequence[int]
    sum: float
    labels: tuple[str, ...] = ()
    exemplars: Mapping[int, Exemplar] = field(default_factory=dict)
    """The latest traced observation of a bucket, by the bucket's number."""


Sample = MetricSample | HistogramSample


def render(samples: Iterable[Sample], *, openmetrics: bool = False) -> bytes:
    """Returns the samples in Prometheus' text format. With `openmetrics`, returns them in OpenMetrics' format, with
    exemplars.

    The samples of a metric are kept together. Metrics appear in the order of their first samples.
    """
    by_metric: defaultdict[Metric, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_metric[sample.metric].append(sample)
    lines = (line for metric, found in by_metric.items() for line in _family(metric, found, openmetrics))
    return "".join(f"{line}\n" for line in (*lines, *["# EOF"] * openmetrics)).encode(errors="replace")


def _family(metric: Metric, samples: Iterable[Sample], openmetrics: bool) -> Iterator[str]:
    name, family = metric.exposed_name, metric.name if openmetrics else metric.exposed_name
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {family} {text}"
    yield f"# TYPE {family} {metric.type}"
    order = sorted(range(len(metric.labels)), key=metric.labels.__getitem__)
    bounds = [*map(_number, metric.buckets), "+Inf"]
    for sample in samples:
        pairs = [f'{metric.labels[at]}="{sample.labels[at].translate(_ESCAPES)}"' for at in order]
        labels = f"{{{','.join(pairs)}}}" if pairs else ""
        if isinstance(sample, MetricSample):
            yield f"{name}{labels} {_number(sample.value)}"
            continue
        for at, (bound, count) in enumerate(zip(bounds, accumulate(sample.counts), strict=True)):
            exemplar = _exemplar(sample.exemplars.get(at)) if openmetrics else ""
            yield f"{name}_bucket{{{','.join([*pairs, f'le={chr(34)}{bound}{chr(34)}'])}}} {count}.0{exemplar}"
        yield f"{name}_count{labels} {sum(sample.counts)}.0"
        yield f"{name}_sum{labels} {_number(sample.sum)}"


def _exemplar(found: Exemplar | None) -> str:
    return "" if found is None else f' # {{trace_id="{found.trace_id}"}} {_number(found.value)} {found.at_s:.3f}'


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class HistogramRecorder:
    """A histogram that counts without a lock, because only one thread changes it. Its labels are given when it is
    read."""

    __slots__ = ("_counts", "_exemplars", "_metric", "_sum")

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._counts = [0] * (len(metric.buckets) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, times: int = 1, trace_id: str = "") -> None:
        """Counts `times` observations of a value. If `trace_id` is given, the observation becomes the exemplar of its
        bucket."""
        bucket = bisect_left(self._metric.buckets, value)
        self._counts[bucket] += times
        self._sum += value * times
        if trace_id:
            self._exemplars[bucket] = Exemplar(trace_id, value, time.time())

    def sample(self, *labels: str) -> HistogramSample:
        return HistogramSample(self._metric, tuple(self._counts), self._sum, labels, dict(self._exemplars))


class ValueRecorder:
    """A counter or gauge with several values, one for each combination of the metric's last labels. The metric's first
    labels are the same for all values, and are passed to `samples`. Only one thread may change the values.
    """

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
