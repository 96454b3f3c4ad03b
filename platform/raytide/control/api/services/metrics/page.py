"""Renders the API's metrics page, and collects the latencies that clients report."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from raytide.control.api.auth import Caller
from raytide.control.api.health import HealthMonitor
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.metrics.cluster import backup_samples, cluster_samples, cost_samples, job_samples
from raytide.control.api.services.metrics.endpoints import (
    REGRESSION_SHOWN_S,
    ReplicaRestarts,
    canary_samples,
    endpoint_samples,
)
from raytide.control.backup.results import read_results, work_dir_of
from raytide.control.views import Live
from raytide.core.config import Config
from raytide.core.money import to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.state import Store
from raytide.core.state.tenancy.audit import AuditLog
from raytide.core.telemetry.catalogue.client import CLIENT_FIRST_TOKEN_SECONDS, CLIENT_REQUEST_SECONDS
from raytide.core.telemetry.catalogue.control import AUDIT_MISSING
from raytide.core.telemetry.metrics import HistogramSample, Metric, MetricSample, Sample, render
from raytide.core.telemetry.series_limits import SeriesLimits

AUDIT_PERIOD_S = 300.0
Counts = tuple[Annotated[int, Field(ge=0, le=1_000_000)], ...]
Total = Annotated[float, Field(ge=0, le=1e12)]


class ClientLatencyReport(Config):
    """The latencies of whole requests and of first tokens that a client observed since its last report.

    For each of the two, the report contains the number of latencies in each histogram bucket, and the sum of the
    latencies in seconds.
    """

    requests: Counts = Field(max_length=len(CLIENT_REQUEST_SECONDS.buckets) + 1)
    requests_s: Total
    first_tokens: Counts = Field(max_length=len(CLIENT_FIRST_TOKEN_SECONDS.buckets) + 1)
    first_tokens_s: Total

    @model_validator(mode="after")
    def _whole(self) -> ClientLatencyReport:
        for counts, metric in (
            (self.requests, CLIENT_REQUEST_SECONDS),
            (self.first_tokens, CLIENT_FIRST_TOKEN_SECONDS),
        ):
            if len(counts) != len(metric.buckets) + 1:
                raise ValueError(f"{metric.name} has {len(metric.buckets) + 1} buckets, not {len(counts)}")
        return self


class ClientLatencies:
    """The sums of all client latencies that were reported since this process started. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._sums: dict[tuple[str, Metric], tuple[list[int], float]] = {}

    def report(self, endpoint: str, body: Mapping[str, object], caller: Caller) -> None:
        caller.require_team(self._store.endpoint(endpoint).spec.team)
        found = ClientLatencyReport.parse(body, where="latency")
        with self._lock:
            self._add((endpoint, CLIENT_REQUEST_SECONDS), found.requests, found.requests_s)
            self._add((endpoint, CLIENT_FIRST_TOKEN_SECONDS), found.first_tokens, found.first_tokens_s)

    def samples(self) -> Iterator[HistogramSample]:
        with self._lock:
            for (endpoint, metric), (counts, total) in self._sums.items():
                yield HistogramSample(metric, tuple(counts), total, (endpoint,))

    def _add(self, key: tuple[str, Metric], counts: Counts, total: float) -> None:
        before, sum_before = self._sums.get(key, ([0] * len(counts), 0.0))
        self._sums[key] = [a + b for a, b in zip(before, counts, strict=True)], sum_before + total


class AuditCheck:
    """Counts the missing entries of the audit log. A count is reused for some minutes, because counting reads the log's
    whole index."""

    def __init__(self, log: AuditLog) -> None:
        self._log, self._lock = log, threading.Lock()
        self._missing, self._due_s = 0, -math.inf

    def sample(self, now_s: float) -> MetricSample:
        with self._lock:
            if now_s >= self._due_s or now_s < self._due_s - AUDIT_PERIOD_S:
                self._missing, self._due_s = self._log.missing(), now_s + AUDIT_PERIOD_S
        return MetricSample(AUDIT_MISSING, self._missing)


class ApiMetrics:
    """The metrics of one API process."""

    def __init__(self, store: Store, config: ClusterConfig, accounts: LimitsService, watch: HealthMonitor) -> None:
        self._store, self._config, self._accounts, self._watch = store, config, accounts, watch
        self._limits = SeriesLimits()
        self._restarts = ReplicaRestarts()
        self._audit = AuditCheck(store.tenancy.audit)
        self.client_latencies = ClientLatencies(store)

    def page(self, live: Live, now_s: float) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return render(self._limits.apply(self.samples(live, now_s)))

    def samples(self, live: Live, now_s: float) -> Iterator[Sample]:
        intervals, held = self._store.books.intervals(), self._store.census.held_jobs()
        yield from cluster_samples(self._store, live, self._watch, self._config, intervals, held)
        yield from job_samples(held, self._store.census.longest_waiting(), now_s)
        yield from endpoint_samples(self._store, live, intervals)
        yield from canary_samples(self._store.rollouts.rolled_back(now_s - REGRESSION_SHOWN_S))
        yield self._audit.sample(now_s)
        self._restarts.observe(live.loads)
        yield from self._restarts.samples()
        yield from self.client_latencies.samples()
        if (backup := self._config.settings.backup) is not None:
            yield from backup_samples(backup, read_results(work_dir_of(self._config.name)), now_s)
        yield from cost_samples(self._store.books, self._accounts.specs(), intervals, to_us(now_s))
