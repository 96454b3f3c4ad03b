"""The monitor's loop, in one process with one event loop: scrape metrics, write history, evaluate rules, act."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx

from raytide.core.logs import logger
from raytide.core.telemetry.catalogue import monitoring as m
from raytide.core.telemetry.metrics import HistogramSample, MetricSample, Sample
from raytide.core.telemetry.page import MetricsPage, Query
from raytide.dashboards.alerts.records import FILE
from raytide.dashboards.alerts.runner import ActionRunner
from raytide.dashboards.history.writer import HistoryWriter
from raytide.dashboards.monitor.alerting import Alerting
from raytide.dashboards.monitor.anomalies import Anomalies
from raytide.dashboards.monitor.scraper import Scraper, ScrapeTarget, targets_from_discovery

log = logger(__name__)

_LOOK_S = 1.0
"""The longest time between two checks for alerts that other processes have written."""
_TIMEOUT_S = 5.0


class Monitor:
    """The monitor of one cluster."""

    def __init__(
        self,
        run_dir: Path,
        api_url: str,
        scrape_s: float,
        history: HistoryWriter,
        scraper: Scraper,
        http: httpx.AsyncClient,
        alerting: Alerting,
        runner: ActionRunner,
        anomalies: Anomalies,
        more: Callable[[], Iterable[MetricSample | HistogramSample]] = tuple,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`more` returns samples of other parts of this process, for the monitor's metrics page."""
        self._run_dir, self._api_url, self._scrape_s = run_dir, api_url, scrape_s
        self._history, self._scraper, self._http = history, scraper, http
        self._alerting, self._runner, self._more, self._now_s = alerting, runner, more, now_s
        self._anomalies = anomalies
        self._targets: list[ScrapeTarget] = []
        self._seen = 0.0
        self.page = MetricsPage(self._page)

    async def run(self) -> None:
        """Watches the cluster until this task is cancelled."""
        await asyncio.to_thread(self._alerting.resume, self._now_s())
        due_s = time.monotonic()
        while True:
            if time.monotonic() >= due_s:
                due_s = max(due_s + self._scrape_s, time.monotonic())
                await self.watch_once()
            elif self._changed_at() != self._seen:
                await asyncio.to_thread(self._act, self._now_s())
            await asyncio.sleep(min(_LOOK_S, max(0.0, due_s - time.monotonic())))

    async def watch_once(self) -> None:
        """Scrapes the metrics of all programs once, evaluates the rules on them, and runs the actions and sends the
        messages that are due. If the metrics cannot be stored, the rules are not evaluated.
        """
        timeout_s = min(_TIMEOUT_S, self._scrape_s)
        await self._find_targets(timeout_s)
        points = await self._scraper.scrape(self._targets, timeout_s)
        now_s = self._now_s()

        def work() -> None:
            if self._history.write(now_s, points):  # without new points nothing can be concluded
                self._anomalies.look()
                self._alerting.evaluate(now_s)
            self._act(now_s)

        await asyncio.to_thread(work)

    async def _find_targets(self, timeout_s: float) -> None:
        """Asks the API for the scrape targets. While the API does not answer, the last targets stay."""
        try:
            response = await self._http.get(f"{self._api_url}/v1/targets", timeout=timeout_s)
            response.raise_for_status()
            self._targets = targets_from_discovery(response.json())
        except (httpx.HTTPError, ValueError) as error:
            log.warning("the API does not list its targets", extra={"error": repr(error)})

    def _act(self, now_s: float) -> None:
        self._seen = self._changed_at()  # before acting, so that what another process writes meanwhile is not missed
        self._alerting.act(now_s)

    def _changed_at(self) -> float:
        try:
            return (self._run_dir / FILE).stat().st_mtime
        except OSError:
            return 0.0

    async def _page(self, query: Query) -> Iterable[Sample]:
        return self._samples()

    def _samples(self) -> Iterable[Sample]:
        for (job, instance), is_up in self._scraper.up.items():
            yield MetricSample(m.SCRAPE_UP, float(is_up), (job, instance))
        for (name, severity), count in self._alerting.firing.items():
            yield MetricSample(m.ALERTS, float(count), (name, severity))
        for (kind, outcome), count in self._runner.outcomes().items():
            yield MetricSample(m.ACTIONS, float(count), (kind, outcome))
        yield from self._anomalies.samples()
        yield from self._more()
