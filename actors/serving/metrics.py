"""A replica's Prometheus metrics: the engine's counters, and histograms of latencies as clients see them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from raytide.actors.engine.types import EngineStats

Outcome = Literal["ok", "aborted", "invalid", "rejected", "error"]
"""`aborted`: the client went away; `invalid`: 4xx; `rejected`: the queue was full; `error`: the server's fault."""

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServingMetrics:
    """Metrics in a registry of their own, so that several apps fit in one process."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.registry = CollectorRegistry()
        self.first_token = self._histogram(
            "raytide_time_to_first_token_seconds", "From the request to its first token", _FIRST_TOKEN_S
        )
        self.inter_token = self._histogram(
            "raytide_inter_token_seconds", "Between two tokens of one request", _INTER_TOKEN_S
        )
        self.request = self._histogram("raytide_request_seconds", "From the request to its end", _REQUEST_S)
        self._outcomes = Counter(
            "raytide_requests", "Requests by how they ended", ("model", "api", "outcome"), registry=self.registry
        )

        self._reused = Counter(
            "raytide_reused_answers", "Requests answered without computing", ("model", "how"), registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model",), registry=self.registry, buckets=buckets).labels(self._model)

    def track(self, api: str) -> RequestTracker:
        return RequestTracker(self, api)

    def count_outcome(self, api: str, outcome: Outcome) -> None:
        self._outcomes.labels(self._model, api, outcome).inc()

    def count_reuse(self, how: str) -> None:
        """Counts a request that shared a stream (`in_flight`) or got a kept answer (`cache`)."""
        self._reused.labels(self._model, how).inc()

    def render(self, stats: EngineStats) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return render_all([(self, stats)])

    def collect(self, stats: EngineStats) -> Iterable[Metric]:
        yield from _EngineCollector(self._model, stats).collect()
        yield from self.registry.collect()


def render_all(models: Iterable[tuple[ServingMetrics, EngineStats]]) -> bytes:
    """Returns the metrics of several models in Prometheus' text format, each family once."""
    families: dict[str, Metric] = {}
    for metrics, stats in models:
        for family in metrics.collect(stats):
            if family.name in families:
                families[family.name].samples.extend(family.samples)
            else:
                families[family.name] = family
    return generate_latest(_Families(families.values()))


class _Families(CollectorRegistry):
    """A registry of metrics that were collected elsewhere."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class RequestTracker:
    """The times of one HTTP request: call `tokens` as they are sent, and `finish` once (later calls change nothing)."""

    def __init__(self, metrics: ServingMetrics, api: str) -> None:
        self._metrics = metrics
        self._api = api
        self._began_s = self._last_s = time.perf_counter()
        self._seen: set[int] = set()
        self._done = False

    def tokens(self, choice: int, count: int) -> None:
        """Records `count` new tokens of one choice, sent now."""
        if not count:
            return
        now_s = time.perf_counter()
        if not self._seen:
            self._metrics.first_token.observe(now_s - self._began_s)
        elif choice in self._seen:
            for _ in range(count):
                self._metrics.inter_token.observe((now_s - self._last_s) / count)
        self._seen.add(choice)
        self._last_s = now_s

    def finish(self, outcome: Outcome) -> None:
        if self._done:
            return
        self._done = True
        seconds = time.perf_counter() - self._began_s
        self._metrics.request.observe(seconds)
        self._metrics.count_outcome(self._api, outcome)


class _EngineCollector:
    def __init__(self, model: str, stats: EngineStats) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        yield self._gauge("raytide_requests_running", "Requests that hold KV blocks", stats.running)
        yield self._gauge("raytide_requests_waiting", "Requests that wait for a place in the engine", stats.waiting)
        yield self._gauge("raytide_kv_use_ratio", "Share of the KV blocks in use", _kv_use(stats))
        yield self._gauge("raytide_step_seconds", "Moving average of one engine step", stats.step_ms / 1e3)
        yield self._counter("raytide_steps", "Engine steps", stats.steps)
        yield self._counter("raytide_prompt_tokens", "Prompt tokens of requests", stats.prompt_tokens)
        yield self._counter("raytide_generated_tokens", "Tokens generated", stats.generated_tokens)
        yield self._counter("raytide_cached_tokens", "Prompt tokens found in the prefix cache", stats.cached_tokens)
        yield self._counter(
            "raytide_preemptions", "Sequences that lost their KV blocks and start over", stats.preemptions
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=("model",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model",))
        family.add_metric((self._model,), value)
        return family


def _kv_use(stats: EngineStats) -> float:
    return 1.0 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0
