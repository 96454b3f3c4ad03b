"""Collects the page of the API's metrics."""

from __future__ import annotations

from collections.abc import Iterator

from raytide.control.api.health import HealthMonitor
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.metrics.client_latency import ClientLatencies
from raytide.control.api.services.metrics.cluster import backup_samples, cluster_samples, cost_samples, job_samples
from raytide.control.api.services.metrics.endpoints import ReplicaRestarts, endpoint_samples
from raytide.control.backup.results import read_results, work_dir_of
from raytide.control.views import Live
from raytide.core.money import to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.state import Store
from raytide.core.telemetry.metrics import Sample, render
from raytide.core.telemetry.series_limits import SeriesLimits


class ApiMetrics:
    """The metrics of one API process."""

    def __init__(self, store: Store, config: ClusterConfig, accounts: LimitsService, watch: HealthMonitor) -> None:
        self._store, self._config, self._accounts, self._watch = store, config, accounts, watch
        self._limits = SeriesLimits()
        self._restarts = ReplicaRestarts()
        self.client_latencies = ClientLatencies(store)

    def page(self, live: Live, now_s: float) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return render(self._limits.apply(self.samples(live, now_s)))

    def samples(self, live: Live, now_s: float) -> Iterator[Sample]:
        intervals, held = self._store.books.intervals(), self._store.census.held_jobs()
        yield from cluster_samples(self._store, live, self._watch, self._config, intervals, held)
        yield from job_samples(held, self._store.census.longest_waiting(), now_s)
        yield from endpoint_samples(self._store, live, intervals)
        self._restarts.observe(live.loads)
        yield from self._restarts.samples()
        yield from self.client_latencies.samples()
        if (backup := self._config.settings.backup) is not None:
            yield from backup_samples(backup, read_results(work_dir_of(self._config.name)), now_s)
        yield from cost_samples(self._store.books, self._accounts.specs(), intervals, to_us(now_s))
