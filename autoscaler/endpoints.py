"""How many replicas an endpoint should have, and since when its load has asked for more or fewer.

Up after `upscale_delay_s` of high load, down after `downscale_delay_s` of low load, and never down on silence: neither
Serve's nor that of a single replica.
"""

from __future__ import annotations

import math
from dataclasses import replace

from raytide.autoscaler.replica_need import needed
from raytide.core.clock import utc
from raytide.core.endpoint import Endpoint, EndpointLoad, ServeSpec
from raytide.core.plan import Scale
from raytide.core.replicas import SERVING_STATES, is_fresh, unheard
from raytide.core.signals import FRESH_S
from raytide.core.snapshot import EndpointView


def wanted(spec: ServeSpec, load: EndpointLoad) -> int:
    """What the load needs, within the bounds."""
    return bounded(spec, math.ceil(needed(spec.replicas, load).replicas - 1e-9))


def bounded(spec: ServeSpec, replicas: int) -> int:
    return min(max(replicas, spec.replicas.min), spec.replicas.max)


def observe(endpoint: Endpoint, load: EndpointLoad | None, now_s: float) -> Endpoint:
    """The endpoint with its clocks of low and high load moved on; silence stops them, one replica's the low one."""
    if load is None or not is_fresh(load, now_s):
        return replace(endpoint, low_since_s=None, high_since_s=None)
    need = wanted(endpoint.spec, load)
    is_low = need < endpoint.target_replicas and not unheard(load, now_s)
    return replace(
        endpoint,
        low_since_s=_since(endpoint.low_since_s, now_s) if is_low else None,
        high_since_s=_since(endpoint.high_since_s, now_s) if need > endpoint.target_replicas else None,
    )


def scaled(endpoint: Endpoint, scale: Scale) -> Endpoint:
    """The endpoint once its new target is published."""
    return replace(endpoint, target_replicas=scale.replicas, low_since_s=None, high_since_s=None, reason=scale.reason)


def decide(view: EndpointView, now_s: float) -> Scale | None:
    """The target that should be published instead, or None."""
    endpoint, load = view.endpoint, view.load
    if endpoint.state not in SERVING_STATES:
        return None
    spec, target = endpoint.spec, endpoint.target_replicas
    if (clamped := bounded(spec, target)) != target:
        return Scale(endpoint.name, clamped, f"{spec.replicas.min} to {spec.replicas.max} replicas are asked for")
    if load is None or not is_fresh(load, now_s):
        return None
    need, because = wanted(spec, load), needed(spec.replicas, load).reason
    if need > target and _lasted(endpoint.high_since_s, now_s) >= spec.replicas.upscale_delay_s:
        return Scale(endpoint.name, need, f"{target} -> {need}: {because}")
    is_low_for_long = _lasted(endpoint.low_since_s, now_s) >= spec.replicas.downscale_delay_s
    if need < target and is_low_for_long and not unheard(load, now_s):
        quiet = f", for {_lasted(endpoint.low_since_s, now_s):.0f} s"
        return Scale(endpoint.name, need, f"{target} -> {need}: {because}{quiet}")
    return None


def silence(view: EndpointView, now_s: float) -> str:
    """Why its target is held, when that is because nothing fresh was heard; else empty."""
    endpoint, load = view.endpoint, view.load
    if endpoint.state not in SERVING_STATES:
        return ""
    if load is None:
        return "nothing was heard of its load yet; its replicas stay as they are"
    if not is_fresh(load, now_s):
        heard = f"its load was last heard of at {utc(load.at_s)}, over {FRESH_S:.0f} s ago"
        return f"{heard}; its replicas stay as they are"
    silent = unheard(load, now_s)
    if silent and wanted(endpoint.spec, load) < endpoint.target_replicas:
        said = f"{silent} of its {load.ready} replicas said nothing of their own in the last {FRESH_S:.0f} s"
        return f"{said}; none is taken away"
    return ""


def _since(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s


def _lasted(since_s: float | None, now_s: float) -> float:
    return 0.0 if since_s is None else now_s - since_s
