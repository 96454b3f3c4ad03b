"""Applies the placement plan to an endpoint with an SLO.

The endpoint's replicas and its pending capacity become `FleetNode`s, and the offerings become pools. The plan becomes a
replica count and a list of nodes to release.
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
from raytide.core.objects.endpoint_load import ReplicaValue
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import CapacityType, NodeState, fits, labels_match, minus, round_up_gpu_share
from raytide.core.objects.plan import Drain, Rejected
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.scheduling.diagnosis import copies_that_fit
from raytide.scheduling.offerings import Offering, Offerings, Purchase
from raytide.scheduling.replicas import is_fresh, replica_shape, replica_throughputs, silent_replicas
from raytide.scheduling.throughput import cost_per_work

ELSEWHERE = ""
"""The pool of replicas on foreign nodes, which raytide can neither buy nor end."""
DRAIN_S = 600.0
"""The time that requests on a released node have to end; requests that take longer are cut off."""

_Offers = Mapping[str, tuple[Offering, int]]
"""Offering and replicas per node, by pool name."""


@dataclass(frozen=True, slots=True)
class EndpointDecision:
    replicas: int
    reason: str
    pools: tuple[tuple[str, str], ...]
    """Node type and zone for each new replica."""
    released_nodes: tuple[str, ...]
    """Nodes whose replicas all go and that run nothing else."""


def decide(
    view: EndpointView, value: ReplicaValue, snapshot: Snapshot, offerings: Offerings, hosts: EndpointHosts
) -> EndpointDecision:
    """Returns the decision for one endpoint. While load reports are stale or the model has learned too little, no
    replica is released. During that time, no spot replica is bought to replace an on-demand replica either.
    """
    spec = view.endpoint.spec.replicas
    is_held = may_not_shrink(view, value, snapshot.at_s)
    held = min(view.endpoint.target_replicas, spec.max) if is_held else 0
    by_pool = _offers(view, offerings)
    nodes = tuple(replica_slots(view, hosts, _cheapest_spot(view, offerings, by_pool)))
    least = _work_of(max(held, min(max(kv_least(view), value.least), spec.max)), nodes, _next_pace(view))
    state = FleetState(
        replica_value=replace(value, spot=max(value.spot, least), ondemand=max(value.ondemand, least)),
        pools=_pools(view, hosts, offerings, by_pool, is_held=is_held),
        nodes=[replace(node, is_spot=True) for node in nodes] if is_held else nodes,
        cold_start_s=cold_start_s(spec, view.load),
    )
    unclamped, plan = state.replica_value, _affordable(state, offerings, by_pool)
    if len(nodes) + len(plan.launch) - len(plan.release) < spec.min:  # few fast replicas do all the work
        plan = _of_at_least(
            spec.min, len(nodes), state, offerings, by_pool, max(replica_throughputs(view).values(), default=0.0)
        )
    released = () if is_held else tuple(_released_nodes(view, hosts, plan.release))
    return EndpointDecision(
        replicas=_count(view, replace(state, replica_value=unclamped), plan, nodes, released, is_held=is_held),
        reason=f"{plan.reason}; a start takes {state.cold_start_s:.0f} s, as {cold_start_source(view.load)}",
        pools=tuple(_place(name) for name in plan.launch),
        released_nodes=released,
    )


def _of_at_least(
    least: int, there: int, state: FleetState, offerings: Offerings, by_pool: _Offers, most_pace: float
) -> FleetPlan:
    """Returns the plan with the least additional work that leads to at least `least` replicas; if no work leads to
    that, the plan with as much work as that many of the fastest replicas do.
    """

    def plan(more: int) -> FleetPlan:
        value = state.replica_value
        value = replace(value, spot=value.spot + more, ondemand=value.ondemand + more)
        return _affordable(replace(state, replica_value=value), offerings, by_pool)

    def is_enough(more: int) -> bool:
        found = plan(more)
        return there + len(found.launch) - len(found.release) >= least

    most = math.ceil(least * most_pace)
    return plan(bisect_left(range(most), True, lo=min(1, most), key=is_enough))


def _count(
    view: EndpointView,
    state: FleetState,
    plan: FleetPlan,
    nodes: Sequence[FleetNode],
    released: Collection[str],
    *,
    is_held: bool,
) -> int:
    """Returns the replica count of the plan, including replicas that are worth their price but cannot be bought now."""
    spec, paces = view.endpoint.spec.replicas, replica_throughputs(view)
    if is_held:  # only capacity without a replica can go
        leaving = [node for node in nodes if "+" in node.id][: len(plan.release)]
    else:
        leaving = [node for node in nodes if node.id in plan.release and _goes(node, released)]
    coming = [state.pools[name] for name in plan.launch]
    lacking = state.replica_value.ondemand - work_of(nodes) + work_of(leaving) - sum(pool.work for pool in coming)
    spot, ondemand = sum(pool.is_spot for pool in coming), sum(not node.is_spot for node in nodes)
    kept = len(nodes) - len(leaving)
    more = len(coming) - spot + max(0, math.ceil(lacking / _next_pace(view) - 1e-6))
    most = spec.most
    if paces or len(state.replica_value.late_per_h) > spec.max + 1:  # more than `max` can be worth their price
        more = min(more, max(0, spec.max - kept - spot))
        most = most if is_held else spec.max + min(ondemand, len(nodes) - ondemand + spot)
    return max(spec.min, min(kept + spot + more, most))


def _work_of(replicas: int, nodes: Sequence[FleetNode], next_pace: float) -> int:
    """Returns the work that `replicas` replicas do: first existing ones at their mean speed, then those that fit on
    free capacity bought for the endpoint, then new ones.
    """
    present = [node.work for node in nodes if "+" not in node.id]
    coming = [node.work for node in nodes if "+" in node.id]
    usual = fmean(present) if present else 1.0
    existing, more = min(replicas, len(present)), max(0, replicas - len(nodes))
    work = existing * usual + sum(coming[: replicas - existing]) + more * min(usual, next_pace)
    return int(work + 1e-6)


def _next_pace(view: EndpointView) -> float:
    traffic = view.load.traffic if view.load is not None else None
    return traffic.next_pace if traffic is not None else 1.0


def _goes(node: FleetNode, released: Collection[str]) -> bool:
    """Returns whether the replica goes if it is released. A ready on-demand replica goes only together with its node:
    otherwise Serve might stop another replica, and a replica on a node that stays costs nothing.
    """
    return node.is_spot or not node.is_ready or node.id.partition("#")[0] in released


def may_not_shrink(view: EndpointView, value: ReplicaValue, now_s: float) -> bool:
    load = view.load
    if load is None or not is_fresh(load, now_s) or not value.is_sure:
        return True
    return load.ready == 0 or silent_replicas(load, now_s) > 0


def kv_least(view: EndpointView) -> int:
    """Returns the number of replicas that keeps the KV cache use at its target. The KV cache needs this separate
    minimum, because the value model considers time but not memory.
    """
    return 0 if view.load is None else math.ceil(kv_target(view.endpoint.spec.replicas, view.load).replicas - 1e-9)


def replica_slots(view: EndpointView, hosts: EndpointHosts, spot_micro_usd_h: float = 0.0) -> Iterator[FleetNode]:
    """Yields the endpoint's replicas and free capacity as FleetNodes. A mark in the id of each FleetNode shows its
    kind: `#` for an existing replica, `~` for a replica that is still starting, and `+` for free capacity on a node
    that was bought for the endpoint.

    A replica on a node that is kept for other tenants anyway costs nothing extra, so it counts as spot. A replica
    that costs no more than a spot replica (`spot_micro_usd_h`) also counts as spot.
    """
    name, shape, load, paces = view.endpoint.name, replica_shape(view), view.load, replica_throughputs(view)
    present = Counter(node for node in load.replica_nodes if node not in hosts.leaving) if load else Counter()
    ready = Counter(replica.node for replica in load.replicas) if load else Counter()
    busy: Counter[str] = Counter()
    for replica in load.replicas if load else ():
        busy[replica.node] += round(replica.running + replica.waiting)
    starting = hosts.unattributed.starting_replicas(view, max(0, view.endpoint.target_replicas - sum(present.values())))
    for node_view in hosts.hosting(view):
        node, ray_id = node_view.node, node_view.node.ray_node_id
        existing = present.pop(ray_id, 0) if ray_id else 0
        pool, work = pool_name(node.type, node.zone), paces.get(node.type, 1.0)
        is_cheap = cost_per_work(node.price_micro_usd_h, node.type, paces) <= spot_micro_usd_h * max(
            1, copies_that_fit(shape.resources, node_view.total)
        )
        is_shared = bool(existing) and not _is_alone(node_view, shape, existing)
        is_spot = node.market is CapacityType.SPOT or is_cheap or is_shared
        for at in range(existing):
            yield FleetNode(f"{node.id}#{at}", pool, is_spot, at < ready[ray_id], busy[ray_id], work)
        started = (
            min(starting, hosts.unattributed.replicas_on(node_view, view))
            if starting and ray_id not in hosts.leaving
            else 0
        )
        starting -= started
        yield from (FleetNode(f"{node.id}~{at}", pool, is_spot, False, 0, work) for at in range(started))
        if node.subject == name and node.state in COMING and labels_match(shape.labels, node_view.labels):
            room = min(_room(node_view, shape, existing), view.endpoint.spec.replicas.most)
            yield from (FleetNode(f"{node.id}+{at}", pool, is_spot, False, 0, work) for at in range(room))
    for ray_id, count in sorted(present.items()):
        yield from (FleetNode(f"{ray_id}#{at}", ELSEWHERE, True, at < ready[ray_id]) for at in range(count))


def _room(view: NodeView, shape: Shape, existing: int) -> int:
    """Returns how many more replicas fit; the existing ones are subtracted, since Ray's free resources may not reflect
    them yet.
    """
    need = round_up_gpu_share(shape.resources)
    left = minus(view.total, {name: existing * amount for name, amount in need.items()})
    return min(copies_that_fit(need, view.available), copies_that_fit(need, left))


def spot_held(view: EndpointView, hosts: EndpointHosts) -> dict[str, float]:
    """Returns, for each spot pool, how much work the endpoint's replicas in the pool can do. The unit is the work of
    one replica on the slowest node type.
    """
    spot = {pool_name(v.node.type, v.node.zone) for v in hosts.hosting(view) if v.node.market is CapacityType.SPOT}
    held: dict[str, float] = defaultdict(float)
    for node in replica_slots(view, hosts):
        if node.pool in spot:
            held[node.pool] += node.work
    return held


def prices(view: EndpointView, offerings: Offerings) -> tuple[float, dict[str, float]]:
    """Returns the on-demand price of a unit of work, and the spot price of a unit of work in each spot pool. Prices are
    in dollars an hour. A free offering gets the price of the cheapest paid offering, because the value of a late
    request is derived from the price.
    """
    by_pool = _offers(view, offerings).values()
    found = [(offering, _price(view, offerings, offering, fit) / 1e6) for offering, fit in by_pool]
    spot = {pool_name(o.node_type.name, o.zone): usd_h for o, usd_h in found if o.node_type.market is CapacityType.SPOT}
    ondemand = [usd_h for offering, usd_h in found if offering.node_type.market is not CapacityType.SPOT]
    paid = [usd_h for usd_h in ondemand if usd_h > 0] or [usd_h for usd_h in spot.values() if usd_h > 0] or [1.0]
    return min(paid), {name: usd_h or min(paid) for name, usd_h in spot.items()}


def _offers(view: EndpointView, offerings: Offerings) -> _Offers:
    """Returns the offerings by pool, except those of node types on which first tokens are always late."""
    traffic = view.load.traffic if view.load is not None else None
    too_slow = traffic.too_slow if traffic is not None else ()
    holding = [(o, fit) for o, fit in offerings.offerings_for(replica_shape(view)) if o.node_type.name not in too_slow]
    return {pool_name(o.node_type.name, o.zone): (o, fit) for o, fit in holding}


def _price(view: EndpointView, offerings: Offerings, offering: Offering, fit: int) -> float:
    """Returns the price of a unit of work on this offering, the replica's data included, in micro-dollars an hour."""
    price = offerings.table.member_price(offering, fit, replica_shape(view))
    return cost_per_work(price, offering.node_type.name, replica_throughputs(view))


def _cheapest_spot(view: EndpointView, offerings: Offerings, by_pool: _Offers) -> float:
    """Returns the lowest spot price of a unit of work in micro-dollars an hour, minus infinity without spot."""
    spot = [_price(view, offerings, o, fit) for o, fit in by_pool.values() if o.node_type.market is CapacityType.SPOT]
    return min(spot, default=-math.inf)


def _pools(
    view: EndpointView, hosts: EndpointHosts, offerings: Offerings, by_pool: _Offers, *, is_held: bool
) -> dict[str, ReplicaPool]:
    """Returns all pools that could hold a replica. A pool with a recent failure is tried with one replica. It is not
    tried while the target is held, since each failed try would lead to an on-demand purchase.
    """
    pools, paces = {ELSEWHERE: ReplicaPool(ELSEWHERE, 0.0, is_spot=False, most=0)}, replica_throughputs(view)
    for node in (node_view.node for node_view in hosts.hosting(view)):
        name, usd_h = pool_name(node.type, node.zone), cost_per_work(node.price_micro_usd_h / 1e6, node.type, paces)
        pools[name] = ReplicaPool(name, usd_h, node.market is CapacityType.SPOT, most=0)
    available = offerings.purchasable()
    for name, (offering, fit) in by_pool.items():
        known = offerings.pools.get((offering.node_type.name, offering.zone))
        most = min(int(available[offering.row]) * fit, view.endpoint.spec.replicas.most)
        pools[name] = ReplicaPool(
            name=name,
            usd_h=_price(view, offerings, offering, fit) / 1e6,
            is_spot=offering.node_type.market is CapacityType.SPOT,
            losses_per_h=offering.reclaims_per_h,
            most=min(most, 0 if is_held else 1) if known is not None and known.failures else most,
            work=paces.get(offering.node_type.name, 1.0),
        )
    return pools


def _affordable(state: FleetState, offerings: Offerings, by_pool: _Offers) -> FleetPlan:
    """Returns a plan whose launches are within the limits together: the zones of a node type share its maximum, and all
    launches share the spend limits.
    """
    while True:
        plan, purchase, found = state.plan(), Purchase(), Counter[str]()
        for name in plan.launch:
            offering, fit = by_pool[name]
            if found[name] % fit == 0:
                if not offerings.purchasable(purchase)[offering.row]:
                    continue
                purchase.add(offering, 1)
            found[name] += 1
        if found.total() == len(plan.launch):
            return plan
        more = offerings.purchasable(purchase)
        left = {n: (-(-found[n] // fit) + int(more[offering.row])) * fit for n, (offering, fit) in by_pool.items()}
        short = {
            name: replace(state.pools[name], most=min(state.pools[name].most or 0, left[name])) for name in by_pool
        }
        state = replace(state, pools={**state.pools, **short})


def _place(name: str) -> tuple[str, str]:
    node_type, _, zone = name.partition("/")
    return node_type, zone


def _released_nodes(view: EndpointView, hosts: EndpointHosts, release: tuple[str, ...]) -> Iterator[str]:
    """Yields the nodes to drain: all their replicas are released, nothing else runs there, and the node type keeps its
    minimum. On all other nodes Serve chooses the replica to stop.
    """
    leaving = Counter(node.partition("#")[0] for node in release)
    present = Counter(view.load.replica_nodes) if view.load else Counter()
    shape = replica_shape(view)
    for node_view in hosts.hosting(view):
        node, count = node_view.node, present[node_view.node.ray_node_id]
        is_going = node.state is NodeState.READY and count > 0 and leaving[node.id] >= count
        if is_going and hosts.spare[node.type] > 0 and _is_alone(node_view, shape, count):
            hosts.spare[node.type] -= 1
            yield node.id


def _is_alone(view: NodeView, shape: Shape, count: int) -> bool:
    """Returns whether nothing but `count` replicas of this shape runs on the node."""
    each = round_up_gpu_share(shape.resources)
    theirs = {name: count * amount for name, amount in each.items()}
    return fits({name: total - view.available.get(name, 0.0) for name, total in view.stable_total.items()}, theirs)


def drains(snapshot: Snapshot) -> Iterator[Drain]:
    """Yields a drain for each node that an endpoint has released. The endpoints' target replica counts no longer
    include the replicas on these nodes.
    """
    released = {node_id for view in snapshot.endpoints for node_id in view.given_up}
    nodes = {view.node.id: view.node for view in snapshot.nodes if view.node.id in released}
    for view in snapshot.endpoints:
        for node_id in view.given_up:
            node = nodes[node_id]
            saved = format_usd(node.price_micro_usd_h)
            reason = f"endpoint {view.endpoint.name} has {view.endpoint.target_replicas} replicas without it"
            keep = Rejected(f"keep {node_id}", f"costs {saved}/h more", node.price_micro_usd_h)
            deadline_s = snapshot.at_s + DRAIN_S
            yield Drain(node_id, "notice", deadline_s, f"{reason}; saves {saved}/h", -node.price_micro_usd_h, (keep,))
