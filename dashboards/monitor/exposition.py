"""Reads Prometheus' text format. A line is parsed once: afterwards the text before its value is looked up."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from raytide.dashboards.history.points import label_set
from raytide.dashboards.history.writer import HistoryWriter, Series

MOST_LINES = 50_000
"""The most samples of one page that are read."""
_COUNTED = ("_bucket", "_count", "_sum", "_total")


class PageReader:
    """Reads one page again and again, into the series of a history."""

    def __init__(
        self, history: HistoryWriter, labels: Mapping[str, str], prefixes: tuple[str, ...], names: Collection[str]
    ) -> None:
        """`labels` are added to each series that has none of that name: `job` of a page may be a training job. Only
        metrics with one of the prefixes, or of `names`, are read."""
        self._history, self._labels = history, labels
        self._prefixes, self._names = prefixes, frozenset(names)
        self._known: dict[str, Series | None] = {}

    def read(self, text: str) -> Iterator[tuple[Series, float]]:
        """Yields the samples of the page. Lines that are malformed are left out."""
        types: dict[str, str] = {}
        seen: dict[str, Series | None] = {}
        known, lines = self._known, 0
        for line in text.split("\n"):
            if not line or line[0] == "#":
                if line.startswith("# TYPE "):
                    name, _, kind = line[7:].partition(" ")
                    types[name] = kind.strip()
                continue
            lines += 1
            if lines > MOST_LINES:
                break
            head, brace, rest = line.rpartition("}")
            if brace:
                name = head + brace
            else:
                name, _, rest = line.partition(" ")
            if name in known:
                series = known[name]
            else:
                series = self._series(name, types.get)
            seen[name] = series
            if series is None:
                continue
            try:
                value = float(rest.split(None, 1)[0])
            except (ValueError, IndexError):
                continue
            if not math.isnan(value):
                yield series, value
        self._known = seen  # what left the page is forgotten

    def _series(self, text: str, type_of: Callable[[str], str | None]) -> Series | None:
        metric = text.partition("{")[0].rstrip()
        if not (metric.startswith(self._prefixes) or metric in self._names):
            return None
        from prometheus_client.parser import text_string_to_metric_families

        try:
            (family,) = text_string_to_metric_families(f"{text} 0\n")
            (sample,) = family.samples
        except ValueError:
            return None
        labels = {**self._labels, **{name: value for name, value in sample.labels.items() if value}}
        family_name = next((metric.removesuffix(end) for end in _COUNTED if metric.endswith(end)), metric)
        kind = type_of(metric) or type_of(family_name)
        is_counter = kind == "counter" or (kind in ("histogram", "summary") and metric != family_name)
        return self._history.series(metric, label_set(labels), is_counter)
