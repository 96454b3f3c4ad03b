"""Scaling signals other than requests: the utilization of an endpoint's nodes, and values that users report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import fmean

from raytide.core.objects.endpoint import METERS, Endpoint
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.node import NodeMeasurement, Signal, Use
from raytide.core.specs.rollout import endpoint_of

REPORT_FRESH_S = 300.0
"""The age up to which a reported value counts, in seconds."""

Reported = Mapping[tuple[str, str], Signal]
"""The last reported values by endpoint and signal."""


def with_signals(
    loads: Mapping[str, EndpointLoad],
    endpoints: Iterable[Endpoint],
    reported: Reported,
    nodes: Mapping[str, str],
    use: Mapping[str, Use],
    measured: Mapping[str, NodeMeasurement],
    now_s: float,
) -> dict[str, EndpointLoad]:
    """Returns the loads of endpoints, completed with fresh values of the signals on which each endpoint scales.

    `nodes` maps Ray's node ids to raytide's. The keys of `use` and `measured` are raytide's node ids.
    """
    found = dict(loads)
    for endpoint in endpoints:
        names = [signal.name for signal in endpoint.spec.replicas.scale_on]
        if not names or (load := loads.get(endpoint.name)) is None:
            continue
        hosts = {nodes[ray_id] for ray_id in load.replica_nodes if ray_id in nodes}
        values = {
            name: _used(name, hosts, use, measured, now_s)
            if name in METERS
            else _last(reported.get((endpoint_of(endpoint.name), name)), now_s)
            for name in names
        }
        known = {name: value for name, value in values.items() if value is not None}
        found[endpoint.name] = replace(load, signals=known)
    return found


def _used(
    meter: str, hosts: Iterable[str], use: Mapping[str, Use], measured: Mapping[str, NodeMeasurement], now_s: float
) -> float | None:
    """Returns the mean use of the nodes, 0 to 1; None unless some of them were measured lately."""
    if meter == "memory":
        readings = [measured[node].reading for node in hosts if node in measured]
        signals = [Signal(r.memory_use, r.at_s) for r in readings if r.memory_use is not None]
    else:
        signals = [signal for node in hosts for name, signal in use.get(node, {}).items() if name == meter]
    fresh = [signal.value for signal in signals if signal.is_fresh(now_s)]
    return fmean(fresh) if fresh else None


def _last(signal: Signal | None, now_s: float) -> float | None:
    return None if signal is None or now_s - signal.at_s > REPORT_FRESH_S else signal.value
