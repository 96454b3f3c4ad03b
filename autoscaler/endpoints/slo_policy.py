"""An endpoint with an SLO, as the serving policy sees it: its replicas and what is coming for it are places, what the
market offers are pools. And what the policy's plan means for the endpoint and its nodes. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from raytide.autoscaler.endpoints.load_target import cold_start_s, cold_start_source, kv_target
from raytide.autoscaler.endpoints.replica_hosts import COMING, EndpointHosts
from raytide.autoscaler.endpoints.replica_placement import FleetNode, FleetPlan, FleetState, ReplicaPool, work_of
from raytide.autoscaler.spot.reclaim_hazard import pool_name
from raytide.core.money import format_usd
from raytide.core.objects.endpoint import ReplicaValue
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import CapacityType as Kind
from raytide.core.objects.node import NodeState, fits, labels_match, minus, round_up_gpu_share
from raytide.core.objects.plan import Drain, Rejected
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.scheduling.diagnosis import copies_that_fit
from raytide.scheduling.offerings import Offering, Offerings, Purchase
from raytide.scheduling.replicas import is_fresh, replica_shape, replica_throughputs, silent_replicas
from raytide.scheduling.throughput import cost_per_work

ELSEWHERE = ""
"""The pool of replicas on nodes that are not ours to buy or end."""
DRAIN_S = 600.0
"""Requests that go on for longer on a node that is given up are cut off."""

_Offers = Mapping[str, tuple[Offering, int]]
"""What the market has for a replica, by the name of its pool, and how many replicas a node would hold."""


@dataclass(frozen=True, slots=True)
class EndpointDecision:
    replicas: int
    reason: str
    pools: tuple[tuple[str, str], ...]
    """Node type and zone in which each replica that is new is to be bought."""
    released_nodes: tuple[str, ...]
    """Nodes on which all replicas, and nobody else, are to go."""


def decide(
    view: EndpointView, worth: ReplicaValue, snapshot: Snapshot, market: Offerings, hosts: EndpointHosts
) -> EndpointDecision:
    """What the policy wants. While something was not heard, or too little was seen, nothing is taken away, and so
    nothing is bought to replace what is there."""
    spec = view.endpoint.spec.replicas
    is_held = may_not_shrink(view, worth, snapshot.at_s)
    held = min(view.endpoint.target_replicas, spec.max) if is_held else 0
    offers = _offers(view, market)
    places = tuple(replica_slots(view, hosts, _cheapest_spot(view, offers)))
    least = _work_of(max(held, min(max(kv_least(view), worth.least), spec.max)), places, _next_pace(view))
    state = FleetState(
        replica_value=replace(worth, spot=max(worth.spot, least), ondemand=max(worth.ondemand, least)),
        pools=_pools(view, hosts, market, offers, is_held=is_held),
        nodes=[replace(place, is_spot=True) for place in places] if is_held else places,
        cold_start_s=cold_start_s(spec, view.load),
    )
    asked, plan = state.replica_value, _affordable(state, market, offers)
    if len(places) + len(plan.launch) - len(plan.release) < spec.min:  # few fast replicas do all that is wanted
        plan = _of_at_least(
            spec.min, len(places), state, market, offers, max(replica_throughputs(view).values(), default=0.0)
        )
    given_up = () if is_held else tuple(_released_nodes(view, hosts, plan.release))
    return EndpointDecision(
        replicas=_count(view, replace(state, replica_value=asked), plan, places, given_up, is_held=is_held),
        reason=f"{plan.reason}; a start takes {state.cold_start_s:.0f} s, as {cold_start_source(view.load)}",
        pools=tuple(_place(name) for name in plan.launch),
        released_nodes=given_up,
    )


def _of_at_least(
    least: int, there: int, state: FleetState, market: Offerings, offers: _Offers, most_pace: float
) -> FleetPlan:
    """The plan for the least more work that takes so many replicas, or for all that so many could do."""

    def plan(more: int) -> FleetPlan:
        worth = replace(
            state.replica_value, spot=state.replica_value.spot + more, ondemand=state.replica_value.ondemand + more
        )
        return _affordable(replace(state, replica_value=worth), market, offers)

    def is_enough(more: int) -> bool:
        found = plan(more)
        return there + len(found.launch) - len(found.release) >= least

    most = math.ceil(least * most_pace)
    return plan(bisect_left(range(most), True, lo=min(1, most), key=is_enough))


def _count(
    view: EndpointView,
    state: FleetState,
    plan: FleetPlan,
    places: Sequence[FleetNode],
    given_up: Collection[str],
    *,
    is_held: bool,
) -> int:
    """The replicas that the plan means, those included that are worth it and cannot be had now."""
    spec, paces = view.endpoint.spec.replicas, replica_throughputs(view)
    if is_held:  # what nobody sits on is no replica that could be taken away
        going = [place for place in places if "+" in place.id][: len(plan.release)]
    else:
        going = [place for place in places if place.id in plan.release and _goes(place, given_up)]
    coming = [state.pools[name] for name in plan.launch]
    lacking = state.replica_value.ondemand - work_of(places) + work_of(going) - sum(pool.work for pool in coming)
    spot, ondemand = sum(pool.is_spot for pool in coming), sum(not place.is_spot for place in places)
    kept, dear = len(places) - len(going), len(coming) - spot + max(0, math.ceil(lacking / _next_pace(view) - 1e-6))
    most = spec.most
    if paces or len(state.replica_value.late_per_h) > spec.max + 1:  # more can be worth it than there may be replicas
        dear = min(dear, max(0, spec.max - kept - spot))
        most = most if is_held else spec.max + min(ondemand, len(places) - ondemand + spot)
    return max(spec.min, min(kept + spot + dear, most))


def _work_of(replicas: int, places: Sequence[FleetNode], next_pace: float) -> int:
    """What so many do: those that are there as much as they do on average, then those that are coming, then others."""
    here = [place.work for place in places if "+" not in place.id]
    coming = [place.work for place in places if "+" in place.id]
    usual = fmean(here) if here else 1.0
    seated, more = min(replicas, len(here)), max(0, replicas - len(places))
    work = seated * usual + sum(coming[: replicas - seated]) + more * min(usual, next_pace)
    return int(work + 1e-6)


def _next_pace(view: EndpointView) -> float:
    traffic = view.load.traffic if view.load is not None else None
    return traffic.next_pace if traffic is not None else 1.0


def _goes(place: FleetNode, given_up: Collection[str]) -> bool:
    """On demand it goes with its node: Serve might take another, and while others stay there it costs nothing."""
    return place.is_spot or not place.is_ready or place.id.partition("#")[0] in given_up


def may_not_shrink(view: EndpointView, worth: ReplicaValue, now_s: float) -> bool:
    load = view.load
    if load is None or not is_fresh(load, now_s) or not worth.is_sure:
        return True
    return load.ready == 0 or silent_replicas(load, now_s) > 0


def kv_least(view: EndpointView) -> int:
    """What the KV caches ask for: the policy counts time, and knows nothing of memory."""
    return 0 if view.load is None else math.ceil(kv_target(view.endpoint.spec.replicas, view.load).replicas - 1e-9)


def replica_slots(view: EndpointView, hosts: EndpointHosts, spot_micro_usd_h: float = 0.0) -> Iterator[FleetNode]:
    """Its replicas that stay, each a place (#), those whose process starts (~), the room of nodes bought for it (+).

    A place on a node that others keep costs no more than spot does. `spot_micro_usd_h`: what a replica costs there.
    """
    name, shape, load, paces = view.endpoint.name, replica_shape(view), view.load, replica_throughputs(view)
    here = Counter(node for node in load.replica_nodes if node not in hosts.leaving) if load else Counter()
    ready = Counter(replica.node for replica in load.replicas) if load else Counter()
    busy: Counter[str] = Counter()
    for replica in load.replicas if load else ():
        busy[replica.node] += round(replica.running + replica.waiting)
    starting = hosts.unattributed.starting(view, max(0, view.endpoint.target_replicas - sum(here.values())))
    for node_view in hosts.hosting(view):
        node, ray_id = node_view.node, node_view.node.ray_node_id
        seated = here.pop(ray_id, 0) if ray_id else 0
        pool, work = pool_name(node.type, node.zone), paces.get(node.type, 1.0)
        is_cheap = cost_per_work(node.price_micro_usd_h, node.type, paces) <= spot_micro_usd_h * max(
            1, copies_that_fit(shape.resources, node_view.total)
        )
        is_shared = bool(seated) and not _is_alone(node_view, shape, seated)
        is_spot = node.market is Kind.SPOT or is_cheap or is_shared
        for at in range(seated):
            yield FleetNode(f"{node.id}#{at}", pool, is_spot, at < ready[ray_id], busy[ray_id], work)
        started = (
            min(starting, hosts.unattributed.room_on(node_view, view))
            if starting and ray_id not in hosts.leaving
            else 0
        )
        starting -= started
        yield from (FleetNode(f"{node.id}~{at}", pool, is_spot, False, 0, work) for at in range(started))
        if node.subject == name and node.state in COMING and labels_match(shape.labels, node_view.labels):
            room = min(_room(node_view, shape, seated), view.endpoint.spec.replicas.most)
            yield from (FleetNode(f"{node.id}+{at}", pool, is_spot, False, 0, work) for at in range(room))
    for ray_id, count in sorted(here.items()):
        yield from (FleetNode(f"{ray_id}#{at}", ELSEWHERE, True, at < ready[ray_id]) for at in range(count))


def _room(view: NodeView, shape: Shape, seated: int) -> int:
    """For more replicas: Ray may not have taken off yet what those that are seated use."""
    need = round_up_gpu_share(shape.resources)
    left = minus(view.total, {name: seated * amount for name, amount in need.items()})
    return min(copies_that_fit(need, view.available), copies_that_fit(need, left))


def spot_held(view: EndpointView, hosts: EndpointHosts) -> dict[str, float]:
    """What places on spot do by pool."""
    spot = {pool_name(v.node.type, v.node.zone) for v in hosts.hosting(view) if v.node.market is Kind.SPOT}
    held: dict[str, float] = defaultdict(float)
    for node in replica_slots(view, hosts):
        if node.pool in spot:
            held[node.pool] += node.work
    return held


def prices(view: EndpointView, market: Offerings) -> tuple[float, dict[str, float]]:
    """What a replica's work costs an hour on demand, and by spot pool. What is free is priced as what is not: only then
    is it known what a late request is worth."""
    found = [(offer, _price(view, offer, fit) / 1e6) for offer, fit in _offers(view, market).values()]
    spot = {pool_name(o.node_type.name, o.zone): usd_h for o, usd_h in found if o.node_type.market is Kind.SPOT}
    ondemand = [usd_h for offer, usd_h in found if offer.node_type.market is not Kind.SPOT]
    paid = [usd_h for usd_h in ondemand if usd_h > 0] or [usd_h for usd_h in spot.values() if usd_h > 0] or [1.0]
    return min(paid), {name: usd_h or min(paid) for name, usd_h in spot.items()}


def _offers(view: EndpointView, market: Offerings) -> _Offers:
    """Those on which first tokens can be in time."""
    traffic = view.load.traffic if view.load is not None else None
    too_slow = traffic.too_slow if traffic is not None else ()
    holding = [(o, fit) for o, fit in market.offerings_for(replica_shape(view)) if o.node_type.name not in too_slow]
    return {pool_name(o.node_type.name, o.zone): (o, fit) for o, fit in holding}


def _price(view: EndpointView, offer: Offering, fit: int) -> float:
    """Of a replica's work there, in micro-dollars an hour."""
    return cost_per_work(offer.price_micro_usd_h / fit, offer.node_type.name, replica_throughputs(view))


def _cheapest_spot(view: EndpointView, offers: _Offers) -> float:
    """What a replica's work costs there in micro-dollars an hour; nothing is as cheap when there is no spot."""
    spot = [_price(view, o, fit) for o, fit in offers.values() if o.node_type.market is Kind.SPOT]
    return min(spot, default=-math.inf)


def _pools(
    view: EndpointView, hosts: EndpointHosts, market: Offerings, offers: _Offers, *, is_held: bool
) -> dict[str, ReplicaPool]:
    """All that could hold a replica. A pool that failed lately is tried with one; not while the target is held, or
    each try that fails would be made up for on demand."""
    pools, paces = {ELSEWHERE: ReplicaPool(ELSEWHERE, 0.0, is_spot=False, most=0)}, replica_throughputs(view)
    for node in (node_view.node for node_view in hosts.hosting(view)):
        name, is_spot, usd_h = pool_name(node.type, node.zone), node.market is Kind.SPOT, node.price_micro_usd_h / 1e6
        pools[name] = ReplicaPool(name, cost_per_work(usd_h, node.type, paces), is_spot, most=0)
    to_be_had = market.can_have()
    for name, (offer, fit) in offers.items():
        known = market.pools.get((offer.node_type.name, offer.zone))
        most = min(int(to_be_had[offer.row]) * fit, view.endpoint.spec.replicas.most)
        pools[name] = ReplicaPool(
            name=name,
            usd_h=_price(view, offer, fit) / 1e6,
            is_spot=offer.node_type.market is Kind.SPOT,
            losses_per_h=offer.reclaims_per_h,
            most=min(most, 0 if is_held else 1) if known is not None and known.failures else most,
            work=paces.get(offer.node_type.name, 1.0),
        )
    return pools


def _affordable(state: FleetState, market: Offerings, offers: _Offers) -> FleetPlan:
    """The plan of which all can be had together: zones share a type's maximum, and all share the limits."""
    while True:
        plan, basket, found = state.plan(), Purchase(), Counter[str]()
        for name in plan.launch:
            offer, fit = offers[name]
            if found[name] % fit == 0:
                if not market.can_have(basket)[offer.row]:
                    continue
                basket.add(offer, 1)
            found[name] += 1
        if found.total() == len(plan.launch):
            return plan
        more = market.can_have(basket)
        left = {n: (-(-found[n] // fit) + int(more[offer.row])) * fit for n, (offer, fit) in offers.items()}
        short = {name: replace(state.pools[name], most=min(state.pools[name].most or 0, left[name])) for name in offers}
        state = replace(state, pools={**state.pools, **short})


def _place(name: str) -> tuple[str, str]:
    node_type, _, zone = name.partition("/")
    return node_type, zone


def _released_nodes(view: EndpointView, hosts: EndpointHosts, release: tuple[str, ...]) -> Iterator[str]:
    """Of other nodes Serve takes the replica away, wherever it thinks best; so it does while a type has no more nodes
    than its minimum, without those that other endpoints give up."""
    going = Counter(place.partition("#")[0] for place in release)
    here = Counter(view.load.replica_nodes) if view.load else Counter()
    shape = replica_shape(view)
    for node_view in hosts.hosting(view):
        node, count = node_view.node, here[node_view.node.ray_node_id]
        is_going = node.state is NodeState.READY and count > 0 and going[node.id] >= count
        if is_going and hosts.spare[node.type] > 0 and _is_alone(node_view, shape, count):
            hosts.spare[node.type] -= 1
            yield node.id


def _is_alone(view: NodeView, shape: Shape, count: int) -> bool:
    """Whether nothing but so many replicas runs there."""
    each = round_up_gpu_share(shape.resources)
    theirs = {name: count * amount for name, amount in each.items()}
    return fits({name: total - view.available.get(name, 0.0) for name, total in view.countable.items()}, theirs)


def drains(snapshot: Snapshot) -> Iterator[Drain]:
    """Of the nodes that the endpoints' decisions gave up: their targets no longer count on the replicas there."""
    given_up = {node_id for view in snapshot.endpoints for node_id in view.given_up}
    nodes = {view.node.id: view.node for view in snapshot.nodes if view.node.id in given_up}
    for view in snapshot.endpoints:
        for node_id in view.given_up:
            node = nodes[node_id]
            saved = format_usd(node.price_micro_usd_h)
            reason = f"endpoint {view.endpoint.name} has {view.endpoint.target_replicas} replicas without it"
            keep = Rejected(f"keep {node_id}", f"costs {saved}/h more", node.price_micro_usd_h)
            deadline_s = snapshot.at_s + DRAIN_S
            yield Drain(node_id, "notice", deadline_s, f"{reason}; saves {saved}/h", -node.price_micro_usd_h, (keep,))
