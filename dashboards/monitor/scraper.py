"""Scrapes all metrics pages that the API's service discovery lists, concurrently, and returns their values as points of
the history's series. The monitor writes these points.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import httpx

from raytide.core.logs import logger
from raytide.core.telemetry.catalogue import declared_in, ray
from raytide.dashboards.history.points import label_set
from raytide.dashboards.history.writer import HistoryWriter, Series

PREFIXES = ("raytide_", "DCGM_")
"""The metrics that are kept, beside those of `RAY`."""
RAY = {metric.exposed_name: metric for metric in declared_in(ray)}
"""Ray's own metrics that alerts need, with the labels that are kept. Ray's pages have hundreds of others."""
MOST_PAGE_BYTES = 16 << 20
MOST_TARGETS = 5000
_AT_ONCE = 32
MOST_LINES = 50_000
"""The most samples of one page that are read."""
_COUNTED = ("_bucket", "_count", "_sum", "_total")

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """A metrics page, as service discovery describes it."""

    url: str
    labels: tuple[tuple[str, str], ...]
    """The labels of all series of the page, including `job` and `instance`."""


def targets_from_discovery(listed: object) -> list[ScrapeTarget]:
    """Returns the targets in a response of Prometheus' HTTP service discovery. Malformed groups are left out."""
    found = []
    for group in listed if isinstance(listed, list) else ():
        addresses, labels = (group.get("targets"), group.get("labels") or {}) if isinstance(group, dict) else ((), {})
        if not isinstance(addresses, list) or not isinstance(labels, dict):
            continue
        path = str(labels.get("__metrics_path__", "/metrics"))
        query = "&".join(
            f"{name.removeprefix('__param_')}={value}"
            for name, value in sorted(labels.items())
            if name.startswith("__param_")
        )
        plain = {str(name): str(value) for name, value in labels.items() if not str(name).startswith("__")}
        for address in addresses:
            url = f"http://{address}{path}" + (f"?{query}" if query else "")
            found.append(ScrapeTarget(url, label_set({"instance": str(address), **plain})))
    return found[:MOST_TARGETS]


class Scraper:
    """Scrapes metrics pages into points for one history, which it does not write."""

    def __init__(self, http: httpx.AsyncClient, history: HistoryWriter) -> None:
        self._http, self._history = http, history
        self._readers: dict[ScrapeTarget, PageReader] = {}
        self.up: dict[tuple[str, str], bool] = {}
        """The targets of the last scrape, by job and instance: True if the target's page could be read."""

    async def scrape(self, targets: Iterable[ScrapeTarget], timeout_s: float) -> list[tuple[Series, float]]:
        """Returns the samples of all metrics pages, and for each page a sample of `up`: 1, or 0 if the page cannot be
        read within `timeout_s` seconds.
        """
        listed = list(dict.fromkeys(targets))
        limit = asyncio.Semaphore(_AT_ONCE)
        pages = await asyncio.gather(*(self._page(target, limit, timeout_s) for target in listed))
        points: list[tuple[Series, float]] = []
        self.up = {}
        known = set(listed)
        self._readers = {target: reader for target, reader in self._readers.items() if target in known}
        for target, page in zip(listed, pages, strict=True):
            labels = dict(target.labels)
            self.up[labels.get("job", ""), labels.get("instance", "")] = page is not None
            if page is not None:
                if target not in self._readers:
                    self._readers[target] = PageReader(self._history, labels)
                points += self._readers[target].read(page)
            points.append((self._history.series("up", target.labels, False), float(page is not None)))
        return points

    async def _page(self, target: ScrapeTarget, limit: asyncio.Semaphore, timeout_s: float) -> str | None:
        try:
            async with limit, asyncio.timeout(timeout_s), self._http.stream("GET", target.url) as response:
                response.raise_for_status()
                parts, size = [], 0
                async for part in response.aiter_bytes():
                    size += len(part)
                    if size > MOST_PAGE_BYTES:
                        raise ValueError(f"the page has more than {MOST_PAGE_BYTES >> 20} MiB")
                    parts.append(part)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError, ValueError) as error:
            if self.up.get((dict(target.labels).get("job", ""), dict(target.labels).get("instance", "")), True):
                log.warning("a page cannot be scraped", extra={"url": target.url, "error": repr(error)})
            return None
        return b"".join(parts).decode("utf-8", "replace")


class PageReader:
    """Reads one metrics page in Prometheus' text format repeatedly, into the series of a history.

    A line is parsed only when it is new. In later scrapes, its series is looked up by the text before the value.
    """

    def __init__(self, history: HistoryWriter, labels: Mapping[str, str]) -> None:
        """`labels` are added to each series that does not have a label of that name: a page's own `job` may be a
        training job.
        """
        self._history, self._labels = history, labels
        self._known: dict[str, Series | None] = {}

    def read(self, text: str) -> Iterator[tuple[Series, float]]:
        """Yields the samples on the page. Malformed lines, NaN, and metrics that are not kept are left out."""
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
        if not metric.startswith(PREFIXES) and metric not in RAY:
            return None
        from prometheus_client.parser import text_string_to_metric_families

        try:
            (family,) = text_string_to_metric_families(f"{text} 0\n")
            (sample,) = family.samples
        except ValueError:
            return None
        own = sample.labels
        if metric in RAY:
            own = {name: value for name, value in own.items() if name in RAY[metric].labels}
        labels = {**self._labels, **{name: value for name, value in own.items() if value}}
        family_name = next((metric.removesuffix(end) for end in _COUNTED if metric.endswith(end)), metric)
        kind = type_of(metric) or type_of(family_name)
        is_counter = kind == "counter" or (kind in ("histogram", "summary") and metric != family_name)
        return self._history.series(metric, label_set(labels), is_counter)
