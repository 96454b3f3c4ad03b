"""The target number of replicas of each endpoint.

For an endpoint with an SLO, the serving policy (`slo_policy`) sets the target. For any other endpoint, the target rises
after `upscale_delay_s` of high load and falls after `downscale_delay_s` of low load. Low load never lowers it while a
report of Serve or of one of the replicas is stale. A target outside the configured bounds is corrected at once.
"""

from __future__ import annotations

import math
from dataclasses import replace

from raytide.autoscaler.endpoints import slo_policy
from raytide.autoscaler.endpoints.load_target import load_target, replicas_for, signal_targets
from raytide.autoscaler.endpoints.replica_hosts import EndpointHosts
from raytide.core.clock import utc
from raytide.core.objects.endpoint import METERS, Endpoint, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, Traffic
from raytide.core.objects.node import FRESH_S
from raytide.core.objects.plan import Scale
from raytide.core.objects.snapshot import EndpointView, Snapshot
from raytide.scheduling.offerings import Offerings
from raytide.scheduling.replicas import SERVING_STATES, is_fresh, silent_replicas


def set_targets(snapshot: Snapshot) -> tuple[Snapshot, tuple[Scale, ...]]:
    """Returns the snapshot with the new targets, and the Scale actions that publish the targets. A second call on the
    result changes nothing.
    """
    if not snapshot.ray_answers:
        return snapshot, ()
    views, scales = [], []
    has_worth = any(view.worth is not None for view in snapshot.endpoints)
    fleet = (Offerings.from_snapshot(snapshot), EndpointHosts.of(snapshot)) if has_worth else None
    for view in snapshot.endpoints:
        if fleet is None or (found := _planned(view, snapshot, *fleet)) is None:
            scale = decide(view, snapshot.at_s)
        else:
            view, scale = found
        scales += [scale] if scale is not None else []
        views.append(view if scale is None else replace(view, endpoint=scaled(view.endpoint, scale)))
    return replace(snapshot, endpoints=tuple(views)), tuple(scales)


def wanted(endpoint: Endpoint, load: EndpointLoad) -> int:
    """Returns the number of replicas that the load needs, within the configured bounds.

    An endpoint with a hosted backend needs 0. For any other endpoint, the result is 0 only if three things hold: the
    minimum is 0, there are no requests, and the endpoint is not waiting for its first replica to start.
    """
    spec = endpoint.spec
    if spec.backend is not None:
        return 0
    needed = bounded(spec, math.ceil(load_target(spec.replicas, load).replicas - 1e-9))
    if spec.replicas.min > 0:
        return needed
    has_requests = load.ongoing > 0 or (load.traffic is not None and load.traffic.requests_rps > 0)
    is_idle = not has_requests and all(target.replicas <= 0 for target in signal_targets(spec.replicas, load))
    is_starting = endpoint.target_replicas > 0 and load.ready == 0
    return 0 if is_idle and not is_starting else max(1, needed)


def missing(spec: ServeSpec, load: EndpointLoad) -> tuple[str, ...]:
    """Returns the names of the endpoint's scaling signals that should have a value but have none. The use of CPU, GPU
    and memory (METERS) should have a value only while a replica is ready.
    """
    expected = (signal.name for signal in spec.replicas.scale_on if load.ready or signal.name not in METERS)
    return tuple(name for name in expected if name not in load.signals)


def bounded(spec: ServeSpec, replicas: int) -> int:
    return min(max(replicas, spec.replicas.min), spec.replicas.max)


def observe(endpoint: Endpoint, load: EndpointLoad | None, now_s: float) -> Endpoint:
    """Returns the endpoint with updated `low_since_s` and `high_since_s`. `low_since_s` is the time at which the load
    became low, or None if the load is not low now. `high_since_s` is the same for a high load.

    A stale report of Serve resets both times. A stale report of a single replica resets only the time of low load.
    """
    if load is None or not is_fresh(load, now_s):
        return replace(endpoint, low_since_s=None, high_since_s=None)
    need = wanted(endpoint, load)
    is_low = need < endpoint.target_replicas and not silent_replicas(load, now_s) and not missing(endpoint.spec, load)
    return replace(
        endpoint,
        low_since_s=_since(endpoint.low_since_s, now_s) if is_low else None,
        high_since_s=_since(endpoint.high_since_s, now_s) if need > endpoint.target_replicas else None,
    )


def scaled(endpoint: Endpoint, scale: Scale) -> Endpoint:
    """Returns the endpoint after the action `scale`, with the action's new target."""
    return replace(endpoint, target_replicas=scale.replicas, low_since_s=None, high_since_s=None, reason=scale.reason)


def decide(view: EndpointView, now_s: float) -> Scale | None:
    """Returns the new target of an endpoint, from its bounds and its load. Returns None if the target stays
    the same.
    """
    endpoint, load = view.endpoint, view.load
    if endpoint.state not in SERVING_STATES:
        return None
    spec, target = endpoint.spec, endpoint.target_replicas
    most = spec.replicas.most if spec.backend is None else 0
    if (clamped := min(max(target, spec.replicas.min), most)) != target:
        by = " at this hour" if spec.replicas.schedule else ""
        return Scale(endpoint.name, clamped, f"{spec.replicas.min} to {spec.replicas.max} replicas are configured{by}")
    if load is None or not is_fresh(load, now_s):
        return None
    need, because = wanted(endpoint, load), load_target(spec.replicas, load).reason
    if need > target and _lasted(endpoint.high_since_s, now_s) >= spec.replicas.upscale_delay_s:
        return Scale(endpoint.name, need, f"{target} -> {need}: {because}")
    is_low_for_long = _lasted(endpoint.low_since_s, now_s) >= spec.replicas.downscale_delay_s
    if need < target and is_low_for_long and not silent_replicas(load, now_s) and not missing(spec, load):
        quiet = f", for {_lasted(endpoint.low_since_s, now_s):.0f} s"
        return Scale(endpoint.name, need, f"{target} -> {need}: {because}{quiet}")
    return None


def _planned(
    view: EndpointView, snapshot: Snapshot, market: Offerings, hosts: EndpointHosts
) -> tuple[EndpointView, Scale | None] | None:
    """Returns the view with the serving policy's decision; None if the policy does not apply."""
    endpoint, worth = view.endpoint, view.worth
    if worth is None or endpoint.state not in SERVING_STATES or not is_fresh(view.load, snapshot.at_s):
        return None
    found = slo_policy.decide(view, worth, snapshot, market, hosts)
    target = endpoint.target_replicas
    change = f"{target} -> {found.replicas}: {found.reason}"
    scale = Scale(endpoint.name, found.replicas, change) if found.replicas != target else None
    return replace(view, pools=found.pools, given_up=found.released_nodes), scale


def stale_signal(view: EndpointView, now_s: float) -> str:
    """Returns a message if the target stays unchanged because a report is missing or stale. Returns an empty string
    otherwise.
    """
    endpoint, load = view.endpoint, view.load
    if endpoint.state not in SERVING_STATES:
        return ""
    if load is None:
        return "no load was reported yet; its replicas stay as they are"
    if not is_fresh(load, now_s):
        last = f"its load was last reported at {utc(load.at_s)}, over {FRESH_S:.0f} s ago"
        return f"{last}; its replicas stay as they are"
    need = wanted(endpoint, load) if view.worth is None else _replicas_for(view.worth.ondemand, load)
    if need >= endpoint.target_replicas:
        return ""
    if silent := silent_replicas(load, now_s):
        return f"{silent} of its {load.ready} replicas did not report in the last {FRESH_S:.0f} s; none is removed"
    if lacking := missing(endpoint.spec, load):
        return f"{', '.join(lacking)} of scale_on was not reported lately; none is removed"
    if view.worth is not None and load.ready == 0:
        return "no replica answers, so its load is unknown; none is removed"
    if view.worth is not None and not view.worth.is_sure:
        return "this controller has not watched its requests for long enough yet; none is removed"
    return ""


def _replicas_for(work: int, load: EndpointLoad) -> int:
    return math.ceil(replicas_for(work, load.traffic or Traffic()) - 1e-9)


def _since(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s


def _lasted(since_s: float | None, now_s: float) -> float:
    return 0.0 if since_s is None else now_s - since_s
