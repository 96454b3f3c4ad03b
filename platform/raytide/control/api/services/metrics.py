"""Collects the control plane's metrics from the records and the controller's last observation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from raytide.control.api.health import HealthMonitor
from raytide.control.views import Live
from raytide.core import metrics as m
from raytide.core.metrics import MetricSample
from raytide.core.money import MICRO
from raytide.core.objects.endpoint import EndpointLoad
from raytide.core.state import Store


def samples(store: Store, live: Live, watch: HealthMonitor) -> Iterator[MetricSample]:
    yield MetricSample(m.DISK_FREE, watch.free_bytes())
    troubles = {trouble.code for trouble in watch.troubles()}
    yield from (MetricSample(m.TROUBLE, code in troubles, (code,)) for code in ("disk", "store", "controller"))
    nodes = store.nodes(live=True)
    counts = Counter((node.type, str(node.market), str(node.state)) for node in nodes)
    yield from (MetricSample(m.NODES, count, labels) for labels, count in sorted(counts.items()))
    prices: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.started_at_s is not None:
            prices[(node.type, str(node.market))] += node.price_micro_usd_h
    yield from (MetricSample(m.NODE_PRICE, price / MICRO, labels) for labels, price in sorted(prices.items()))
    yield from (MetricSample(m.JOBS, count, labels) for labels, count in sorted(store.census.live_jobs().items()))
    members = store.census.live_members()
    yield from (MetricSample(m.LEASE_MEMBERS, count, (state,)) for state, count in sorted(members.items()))
    for endpoint in store.endpoints():
        yield MetricSample(m.REPLICAS_TARGET, endpoint.target_replicas, (endpoint.name,))
        load = live.loads.get(endpoint.name)
        yield MetricSample(m.REPLICAS_READY, load.ready if load else 0, (endpoint.name,))
        if load is not None:
            yield from _endpoint_samples(endpoint.name, load)
    for node_id, use in live.use.items():
        yield from (MetricSample(m.NODE_USE, signal.value, (node_id, meter)) for meter, signal in use.items())
    yield from (MetricSample(m.POOL_FAILURES, pool.failures, (pool.node_type, pool.zone)) for pool in store.pools())
    booked = store.books.booked("kind")
    yield from (MetricSample(m.BOOKED, amount / MICRO, (kind,)) for kind, amount in sorted(booked.items()))
    yield MetricSample(m.TICKS, live.ticks)
    yield MetricSample(m.TICK_SECONDS, live.tick_s)
    kinds = Counter({"job": 0, "endpoint": 0})
    kinds.update(live.quarantined.values())
    yield from (MetricSample(m.QUARANTINED, count, (kind,)) for kind, count in sorted(kinds.items()))
    yield MetricSample(m.ERRORS, live.errors_total)


def _endpoint_samples(endpoint: str, load: EndpointLoad) -> Iterator[MetricSample]:
    """Yields the metrics that replicas and the router report."""
    yield MetricSample(m.ONGOING, load.ongoing, (endpoint,))
    if load.replicas:
        yield MetricSample(m.KV_USE, fmean(replica.kv_use for replica in load.replicas), (endpoint,))
    if (traffic := load.traffic) is not None:
        yield MetricSample(m.REQUEST_RATE, traffic.requests_rps, (endpoint,))
        yield MetricSample(m.REQUEST_FORECAST, traffic.ahead_rps, (endpoint,))
        yield MetricSample(m.OUTPUT_RATE, traffic.output_tps, (endpoint,))
        if traffic.ttft_s is not None:
            yield MetricSample(m.FIRST_TOKEN, traffic.ttft_s, (endpoint,))
