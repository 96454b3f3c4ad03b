"""Scrapes the pages that the API's service discovery lists, all at once, and writes them into the history."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import httpx

from raytide.core.logs import logger
from raytide.dashboards.history.points import label_set
from raytide.dashboards.history.writer import HistoryWriter, Series
from raytide.dashboards.monitor.exposition import PageReader

PREFIXES = ("raytide_", "DCGM_")
"""The metrics that are kept, besides those that a rule names."""
MOST_PAGE_BYTES = 16 << 20
MOST_TARGETS = 5000
_AT_ONCE = 32

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """A page, as service discovery describes it."""

    url: str
    labels: tuple[tuple[str, str], ...]
    """Those of its series, `job` and `instance` among them."""


def targets_from_discovery(listed: object) -> list[ScrapeTarget]:
    """Returns the targets of Prometheus' HTTP service discovery. Groups that are malformed are left out."""
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
    """Scrapes into one history. `names` are metrics that are kept besides those with raytide's prefixes."""

    def __init__(self, http: httpx.AsyncClient, history: HistoryWriter, names: Collection[str] = ()) -> None:
        self._http, self._history, self._names = http, history, frozenset(names)
        self._readers: dict[ScrapeTarget, PageReader] = {}
        self.up: dict[tuple[str, str], bool] = {}
        """The targets of the last scrape by job and instance, with whether their page was read."""

    async def scrape(self, targets: Iterable[ScrapeTarget], timeout_s: float) -> list[tuple[Series, float]]:
        """Returns the samples of all pages. A page that does not answer in time has none, and is down."""
        listed = list(dict.fromkeys(targets))
        limit = asyncio.Semaphore(_AT_ONCE)
        pages = await asyncio.gather(*(self._page(target, limit, timeout_s) for target in listed))
        points: list[tuple[Series, float]] = []
        self.up = {}
        self._readers = {target: reader for target, reader in self._readers.items() if target in set(listed)}
        for target, page in zip(listed, pages, strict=True):
            labels = dict(target.labels)
            self.up[labels.get("job", ""), labels.get("instance", "")] = page is not None
            if page is not None:
                points += self._reader(target, labels).read(page)
            points.append((self._history.series("up", target.labels, False), float(page is not None)))
        return points

    def _reader(self, target: ScrapeTarget, labels: Mapping[str, str]) -> PageReader:
        if target not in self._readers:
            self._readers[target] = PageReader(self._history, labels, PREFIXES, self._names)
        return self._readers[target]

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
