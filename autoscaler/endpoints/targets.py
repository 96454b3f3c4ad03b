"""How many replicas an endpoint should have, and since when its load has asked for more or fewer.

With an SLO it is what the serving policy says (`live_fleet`). Without: up after `upscale_delay_s` of high load, down
after `downscale_delay_s` of low load. Never down on silence: neither Serve's nor that of a single replica.
"""

from __future__ import annotations

import math
from dataclasses import replace

from raytide.autoscaler.endpoints import slo_policy
from raytide.autoscaler.endpoints.load_target import load_target, replicas_for
from raytide.autoscaler.endpoints.replica_hosts import EndpointHosts
from raytide.core.clock import utc
from raytide.core.objects.endpoint import Endpoint, EndpointLoad, ServeSpec, Traffic
from raytide.core.objects.node import FRESH_S
from raytide.core.objects.plan import Scale
from raytide.core.objects.snapshot import EndpointView, Snapshot
from raytide.scheduling.offerings import Offerings
from raytide.scheduling.replicas import SERVING_STATES, is_fresh, silent_replicas


def set_targets(snapshot: Snapshot) -> tuple[Snapshot, tuple[Scale, ...]]:
    """The targets that should be published, and the snapshot in which they are. Again, it finds nothing more to say."""
    if not snapshot.ray_answers:
        return snapshot, ()
    views, scales = [], []
    has_worth = any(view.worth is not None for view in snapshot.endpoints)
    fleet = (Offerings.of(snapshot), EndpointHosts.of(snapshot)) if has_worth else None
    for view in snapshot.endpoints:
        if fleet is None or (found := _planned(view, snapshot, *fleet)) is None:
            scale = decide(view, snapshot.at_s)
        else:
            view, scale = found
        scales += [scale] if scale is not None else []
        views.append(view if scale is None else replace(view, endpoint=scaled(view.endpoint, scale)))
    return replace(snapshot, endpoints=tuple(views)), tuple(scales)


def wanted(spec: ServeSpec, load: EndpointLoad) -> int:
    """What the load needs, within the bounds."""
    return bounded(spec, math.ceil(load_target(spec.replicas, load).replicas - 1e-9))


def bounded(spec: ServeSpec, replicas: int) -> int:
    return min(max(replicas, spec.replicas.min), spec.replicas.max)


def observe(endpoint: Endpoint, load: EndpointLoad | None, now_s: float) -> Endpoint:
    """The endpoint with its clocks of low and high load moved on; silence stops them, one replica's the low one."""
    if load is None or not is_fresh(load, now_s):
        return replace(endpoint, low_since_s=None, high_since_s=None)
    need = wanted(endpoint.spec, load)
    is_low = need < endpoint.target_replicas and not silent_replicas(load, now_s)
    return replace(
        endpoint,
        low_since_s=_since(endpoint.low_since_s, now_s) if is_low else None,
        high_since_s=_since(endpoint.high_since_s, now_s) if need > endpoint.target_replicas else None,
    )


def scaled(endpoint: Endpoint, scale: Scale) -> Endpoint:
    """The endpoint once its new target is published."""
    return replace(endpoint, target_replicas=scale.replicas, low_since_s=None, high_since_s=None, reason=scale.reason)


def decide(view: EndpointView, now_s: float) -> Scale | None:
    """The target that should be published instead, or None, by the load alone."""
    endpoint, load = view.endpoint, view.load
    if endpoint.state not in SERVING_STATES:
        return None
    spec, target = endpoint.spec, endpoint.target_replicas
    if (clamped := min(max(target, spec.replicas.min), spec.replicas.most)) != target:
        return Scale(endpoint.name, clamped, f"{spec.replicas.min} to {spec.replicas.max} replicas are asked for")
    if load is None or not is_fresh(load, now_s):
        return None
    need, because = wanted(spec, load), load_target(spec.replicas, load).reason
    if need > target and _lasted(endpoint.high_since_s, now_s) >= spec.replicas.upscale_delay_s:
        return Scale(endpoint.name, need, f"{target} -> {need}: {because}")
    is_low_for_long = _lasted(endpoint.low_since_s, now_s) >= spec.replicas.downscale_delay_s
    if need < target and is_low_for_long and not silent_replicas(load, now_s):
        quiet = f", for {_lasted(endpoint.low_since_s, now_s):.0f} s"
        return Scale(endpoint.name, need, f"{target} -> {need}: {because}{quiet}")
    return None


def _planned(
    view: EndpointView, snapshot: Snapshot, market: Offerings, hosts: EndpointHosts
) -> tuple[EndpointView, Scale | None] | None:
    """The view with what the serving policy decided for it; None where it has no say."""
    endpoint, worth = view.endpoint, view.worth
    if worth is None or endpoint.state not in SERVING_STATES or not is_fresh(view.load, snapshot.at_s):
        return None
    found = slo_policy.decide(view, worth, snapshot, market, hosts)
    target = endpoint.target_replicas
    change = f"{target} -> {found.replicas}: {found.reason}"
    scale = Scale(endpoint.name, found.replicas, change) if found.replicas != target else None
    return replace(view, pools=found.pools, given_up=found.released_nodes), scale


def stale_signal(view: EndpointView, now_s: float) -> str:
    """Why its target is held, when that is because nothing fresh was heard; else empty."""
    endpoint, load = view.endpoint, view.load
    if endpoint.state not in SERVING_STATES:
        return ""
    if load is None:
        return "nothing was heard of its load yet; its replicas stay as they are"
    if not is_fresh(load, now_s):
        heard = f"its load was last heard of at {utc(load.at_s)}, over {FRESH_S:.0f} s ago"
        return f"{heard}; its replicas stay as they are"
    wish = wanted(endpoint.spec, load) if view.worth is None else _replicas_for(view.worth.ondemand, load)
    if wish >= endpoint.target_replicas:
        return ""
    if silent := silent_replicas(load, now_s):
        said = f"{silent} of its {load.ready} replicas said nothing of their own in the last {FRESH_S:.0f} s"
        return f"{said}; none is taken away"
    if view.worth is not None and load.ready == 0:
        return "no replica answers, and so nobody knows what it is asked; none is taken away"
    if view.worth is not None and not view.worth.is_sure:
        return "this controller has not watched its requests for long enough yet; none is taken away"
    return ""


def _replicas_for(work: int, load: EndpointLoad) -> int:
    return math.ceil(replicas_for(work, load.traffic or Traffic()) - 1e-9)


def _since(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s


def _lasted(since_s: float | None, now_s: float) -> float:
    return 0.0 if since_s is None else now_s - since_s
