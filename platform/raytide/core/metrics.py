"""The control plane's metrics: every name, type, label and meaning in one table, for the page, Prometheus and Grafana.

Plain data; prometheus_client loads when something is rendered. What an endpoint's replicas measure is theirs
(`raytide.actors.serving.metrics`).
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
    """In the order of the metric's."""


NODES = Metric("raytide_nodes", "gauge", "Nodes by type, market and state", ("type", "market", "state"))
NODE_PRICE = Metric(
    "raytide_price_usd_per_hour", "gauge", "What the nodes that are billed cost an hour", ("type", "market")
)
JOBS = Metric("raytide_jobs", "gauge", "Jobs that are not over, by kind, team and state", ("kind", "team", "state"))
LEASE_MEMBERS = Metric("raytide_lease_members", "gauge", "Seats of leases that are not over, by state", ("state",))
REPLICAS_TARGET = Metric("raytide_replicas_target", "gauge", "Replicas that the controller wants", ("endpoint",))
REPLICAS_READY = Metric("raytide_replicas_ready", "gauge", "Replicas that answer", ("endpoint",))
ONGOING = Metric("raytide_endpoint_requests", "gauge", "Requests being answered or waiting anywhere", ("endpoint",))
REQUEST_RATE = Metric("raytide_endpoint_requests_per_second", "gauge", "Over the last half minute", ("endpoint",))
REQUEST_FORECAST = Metric(
    "raytide_endpoint_forecast_requests_per_second",
    "gauge",
    "At the end of a cold start, never below now",
    ("endpoint",),
)
OUTPUT_RATE = Metric("raytide_endpoint_output_tokens_per_second", "gauge", "Tokens generated", ("endpoint",))
FIRST_TOKEN = Metric("raytide_endpoint_first_token_seconds", "gauge", "Mean over the last half minute", ("endpoint",))
KV_USE = Metric("raytide_endpoint_kv_use_ratio", "gauge", "Mean of the replicas that answer", ("endpoint",))
NODE_USE = Metric("raytide_node_use_ratio", "gauge", "Physical use, as the node's meters said last", ("node", "meter"))
POOL_FAILURES = Metric("raytide_pool_failures", "gauge", "Launches of a pool that failed in a row", ("type", "zone"))
BOOKED = Metric("raytide_booked_usd", "counter", "Money in the ledger by kind of entry", ("kind",))
TICKS = Metric("raytide_controller_ticks", "counter", "Passes of the controller's loop")
TICK_SECONDS = Metric("raytide_controller_tick_seconds", "gauge", "How long the last pass took")
QUARANTINED = Metric(
    "raytide_quarantined", "gauge", "Records whose handling raised and that no decision considers, by kind", ("kind",)
)
ERRORS = Metric("raytide_controller_errors", "counter", "Calls to Ray or to the provider that failed")
DISK_FREE = Metric("raytide_disk_free_bytes", "gauge", "What can still be written to the disk of the run folder")
TROUBLE = Metric(
    "raytide_trouble",
    "gauge",
    "1 while the disk is full, the store refuses writes, or the controller stands still",
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
    """Prometheus' text format, metrics in the order of the catalogue."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tuple(samples)))
    return bytes(generate_latest(registry))


class _Collector:
    def __init__(self, samples: tuple[MetricSample, ...]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        of: defaultdict[Metric, list[MetricSample]] = defaultdict(list)
        for sample in self._samples:
            of[sample.metric].append(sample)
        for metric in CATALOGUE:
            family_of = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = family_of(metric.name, metric.help, labels=metric.labels)
            for sample in of[metric]:
                family.add_metric(sample.labels, sample.value)
            if of[metric]:
                yield family
