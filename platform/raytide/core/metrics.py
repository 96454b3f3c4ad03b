"""The control plane's metrics: names, types, labels and help texts, for `/metrics`, Prometheus and Grafana.

prometheus_client is imported only by `render`. `raytide.actors.serving.metrics` defines the metrics of replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prometheus_client import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    type: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricSample:
    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    """The values of the metric's labels, in order."""


NODES = Metric("raytide_nodes", "gauge", "Nodes by type, market and state", ("type", "market", "state"))
NODE_PRICE = Metric("raytide_price_usd_per_hour", "gauge", "Hourly price of the billed nodes", ("type", "market"))
JOBS = Metric("raytide_jobs", "gauge", "Unfinished jobs by kind, team and state", ("kind", "team", "state"))
LEASE_MEMBERS = Metric("raytide_lease_members", "gauge", "Members of leases in use, by state", ("state",))
REPLICAS_TARGET = Metric("raytide_replicas_target", "gauge", "Target number of replicas", ("endpoint",))
REPLICAS_READY = Metric("raytide_replicas_ready", "gauge", "Ready replicas", ("endpoint",))
ONGOING = Metric("raytide_endpoint_requests", "gauge", "Requests running or waiting", ("endpoint",))
REQUEST_RATE = Metric(
    "raytide_endpoint_requests_per_second", "gauge", "Request rate of the last 30 seconds", ("endpoint",)
)
REQUEST_FORECAST = Metric(
    "raytide_endpoint_forecast_requests_per_second",
    "gauge",
    "Forecast request rate after one cold start",
    ("endpoint",),
)
OUTPUT_RATE = Metric("raytide_endpoint_output_tokens_per_second", "gauge", "Generated tokens per second", ("endpoint",))
FIRST_TOKEN = Metric(
    "raytide_endpoint_first_token_seconds", "gauge", "Mean time to first token in the last 30 seconds", ("endpoint",)
)
KV_USE = Metric("raytide_endpoint_kv_use_ratio", "gauge", "Mean KV cache usage of the ready replicas", ("endpoint",))
NODE_USE = Metric("raytide_node_use_ratio", "gauge", "Last measured physical utilization", ("node", "meter"))
POOL_FAILURES = Metric("raytide_pool_failures", "gauge", "Consecutive failed launches of a pool", ("type", "zone"))
BOOKED = Metric("raytide_booked_usd", "counter", "Cost booked in the ledger, by kind of entry", ("kind",))
TICKS = Metric("raytide_controller_ticks", "counter", "Ticks of the controller")
TICK_SECONDS = Metric("raytide_controller_tick_seconds", "gauge", "Duration of the last tick")
QUARANTINED = Metric(
    "raytide_quarantined", "gauge", "Records excluded from decisions after an error, by kind", ("kind",)
)
ERRORS = Metric("raytide_controller_errors", "counter", "Failed calls to Ray or to the provider")
DISK_FREE = Metric("raytide_disk_free_bytes", "gauge", "Free space on the disk of the run folder")
TROUBLE = Metric(
    "raytide_trouble",
    "gauge",
    "1 while the disk is full, the store refuses writes, or the controller is stalled",
    ("what",),
)

CATALOGUE: tuple[Metric, ...] = (
    NODES,
    NODE_PRICE,
    JOBS,
    LEASE_MEMBERS,
    REPLICAS_TARGET,
    REPLICAS_READY,
    ONGOING,
    REQUEST_RATE,
    REQUEST_FORECAST,
    OUTPUT_RATE,
    FIRST_TOKEN,
    KV_USE,
    NODE_USE,
    POOL_FAILURES,
    BOOKED,
    TICKS,
    TICK_SECONDS,
    QUARANTINED,
    ERRORS,
    DISK_FREE,
    TROUBLE,
)


def render(samples: Iterable[MetricSample]) -> bytes:
    """Returns Prometheus' text format, with metrics in the order of the catalogue."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tuple(samples)))
    return bytes(generate_latest(registry))


class _Collector:
    def __init__(self, samples: tuple[MetricSample, ...]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_metric: defaultdict[Metric, list[MetricSample]] = defaultdict(list)
        for sample in self._samples:
            by_metric[sample.metric].append(sample)
        for metric in CATALOGUE:
            family_of = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = family_of(metric.name, metric.help, labels=metric.labels)
            for sample in by_metric[metric]:
                family.add_metric(sample.labels, sample.value)
            if by_metric[metric]:
                yield family
