"""An endpoint with an SLO, as the serving policy sees it: its replicas and what is coming for it are places, what the
market offers are pools. And what the policy's plan means for the endpoint and its nodes. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from raytide.autoscaler.replica_need import kv_need
from raytide.autoscaler.risk import pool_name
from raytide.autoscaler.serving_fleet import FleetNode, FleetState, ReplicaPool
from raytide.core.endpoint import Worth
from raytide.core.fleet import Market as Kind
from raytide.core.fleet import NodeState, fits, labels_match, minus, whole_shares
from raytide.core.gang import Shape
from raytide.core.market import Market
from raytide.core.money import format_usd
from raytide.core.plan import Drain, Rejected
from raytide.core.replicas import is_fresh, leaving_nodes, replica_shape, unheard
from raytide.core.shortfall import copies
from raytide.core.snapshot import EndpointView, NodeView, Snapshot

ELSEWHERE = ""
"""The pool of replicas on nodes that are not ours to buy or end."""
DRAIN_S = 600.0
"""Requests that go on for longer on a node that is given up are cut off."""

_COMING = (NodeState.REQUESTED, NodeState.LAUNCHING, NodeState.READY)


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    reason: str
    pools: tuple[tuple[str, str], ...]
    """Node type and zone in which each replica that is new is to be bought."""
    given_up: tuple[str, ...]
    """Nodes on which all replicas, and nobody else, are to go."""


def decide(view: EndpointView, worth: Worth, snapshot: Snapshot, market: Market) -> Decision:
    """What the policy wants. While something was not heard, or too little was seen, nothing is taken away."""
    spec, target = view.endpoint.spec.replicas, view.endpoint.target_replicas
    is_held = may_not_shrink(view, worth, snapshot.at_s)
    nodes = tuple(nodes_of(view, snapshot))
    least = min(kv_least(view), spec.most)
    held = target if is_held else 0
    spot_held = held - sum(not node.is_spot for node in nodes)
    worth = replace(worth, spot=max(worth.spot, least, spot_held), ondemand=max(worth.ondemand, least, held))
    plan = FleetState(worth, _pools(view, snapshot, market), nodes, spec.cold_start_s).plan()
    going = () if is_held else tuple(_not_missed(plan.release, nodes, worth.ondemand))
    given_up = tuple(_given_up(view, snapshot, going))
    release = [place for place in nodes if place.id in going and _goes(place, given_up)]
    count = max(len(nodes) + len(plan.launch) - len(release), worth.ondemand)
    return Decision(
        replicas=max(spec.min, min(count, spec.most)),
        reason=plan.reason,
        pools=tuple(_place(name) for name in plan.launch),
        given_up=given_up,
    )


def _not_missed(release: Sequence[str], nodes: Sequence[FleetNode], least: int) -> Iterator[str]:
    """Those without which as many answer as are worth it on demand: none goes for one that is yet to be bought."""
    is_ready = {node.id: node.is_ready for node in nodes}
    ready = sum(is_ready.values())
    for id in release:
        if is_ready[id] and ready <= least:
            continue
        ready -= is_ready[id]
        yield id


def _goes(place: FleetNode, given_up: Collection[str]) -> bool:
    """On demand it goes with its node: Serve might take another, and while others stay there it costs nothing."""
    return place.is_spot or not place.is_ready or place.id.partition("#")[0] in given_up


def may_not_shrink(view: EndpointView, worth: Worth, now_s: float) -> bool:
    return view.load is None or not is_fresh(view.load, now_s) or bool(unheard(view.load, now_s)) or not worth.is_sure


def kv_least(view: EndpointView) -> int:
    """What the KV caches ask for: the policy counts time, and knows nothing of memory."""
    return 0 if view.load is None else math.ceil(kv_need(view.endpoint.spec.replicas, view.load).replicas - 1e-9)


def nodes_of(view: EndpointView, snapshot: Snapshot) -> Iterator[FleetNode]:
    """Its replicas that stay, each a place, and the room of nodes that were bought for it.

    A place on a node that others keep costs no more than spot does.
    """
    name, shape, load = view.endpoint.name, replica_shape(view), view.load
    leaving = leaving_nodes(snapshot)
    here = Counter(node for node in load.replica_nodes if node not in leaving) if load else Counter()
    ready = Counter(replica.node for replica in load.replicas) if load else Counter()
    busy: Counter[str] = Counter()
    for replica in load.replicas if load else ():
        busy[replica.node] += round(replica.running + replica.waiting)
    for node_view in snapshot.nodes:
        node, ray_id = node_view.node, node_view.node.ray_node_id
        seated = here.pop(ray_id, 0) if ray_id else 0
        pool = pool_name(node.type, node.zone)
        is_spot = node.market is Kind.SPOT or (bool(seated) and not _is_alone(node_view, shape, seated))
        for at in range(seated):
            yield FleetNode(f"{node.id}#{at}", pool, is_spot, at < ready[ray_id], busy[ray_id])
        if node.subject == name and node.state in _COMING and labels_match(shape.labels, node_view.labels):
            room = _room(node_view, shape, seated)
            yield from (FleetNode(f"{node.id}+{at}", pool, is_spot, False) for at in range(room))
    for ray_id, count in sorted(here.items()):
        yield from (FleetNode(f"{ray_id}#{at}", ELSEWHERE, True, at < ready[ray_id]) for at in range(count))


def _room(view: NodeView, shape: Shape, seated: int) -> int:
    """For more replicas: Ray may not have taken off yet what those that are seated use."""
    need = whole_shares(shape.resources)
    left = minus(view.total, {name: seated * amount for name, amount in need.items()})
    return min(copies(need, view.available), copies(need, left))


def spot_held(view: EndpointView, snapshot: Snapshot) -> Counter[str]:
    """Places on spot by pool."""
    spot = {pool_name(v.node.type, v.node.zone) for v in snapshot.nodes if v.node.market is Kind.SPOT}
    return Counter(node.pool for node in nodes_of(view, snapshot) if node.pool in spot)


def prices(market: Market, shape: Shape) -> tuple[float, dict[str, float]]:
    """What a replica costs an hour on demand, and by spot pool. What is free is priced as what is not: only then is it
    known what a late request is worth."""
    found = [(offer, offer.price_micro_usd_h / fit / 1e6) for offer, fit in market.holding(shape)]
    spot = {pool_name(o.node_type.name, o.zone): usd_h for o, usd_h in found if o.node_type.market is Kind.SPOT}
    ondemand = [usd_h for offer, usd_h in found if offer.node_type.market is not Kind.SPOT]
    paid = [usd_h for usd_h in ondemand if usd_h > 0] or [usd_h for usd_h in spot.values() if usd_h > 0] or [1.0]
    return min(paid), {name: usd_h or min(paid) for name, usd_h in spot.items()}


def _pools(view: EndpointView, snapshot: Snapshot, market: Market) -> dict[str, ReplicaPool]:
    """All that could hold a replica; a pool that failed lately is tried with one."""
    pools = {ELSEWHERE: ReplicaPool(ELSEWHERE, 0.0, is_spot=False, most=0)}
    for node in (node_view.node for node_view in snapshot.nodes):
        name, is_spot = pool_name(node.type, node.zone), node.market is Kind.SPOT
        pools[name] = ReplicaPool(name, node.price_micro_usd_h / 1e6, is_spot, most=0)
    to_be_had = market.can_have()
    for offer, fit in market.holding(replica_shape(view)):
        name = pool_name(offer.node_type.name, offer.zone)
        known = market.pools.get((offer.node_type.name, offer.zone))
        most = int(to_be_had[offer.row]) * fit
        pools[name] = ReplicaPool(
            name=name,
            usd_h=offer.price_micro_usd_h / fit / 1e6,
            is_spot=offer.node_type.market is Kind.SPOT,
            losses_per_h=offer.deaths_per_h,
            most=min(most, 1) if known is not None and known.failures else most,
        )
    return pools


def _place(name: str) -> tuple[str, str]:
    node_type, _, zone = name.partition("/")
    return node_type, zone


def _given_up(view: EndpointView, snapshot: Snapshot, release: Sequence[str]) -> Iterator[str]:
    """Of other nodes Serve takes the replica away, wherever it thinks best."""
    going = Counter(place.partition("#")[0] for place in release)
    here = Counter(view.load.replica_nodes) if view.load else Counter()
    shape = replica_shape(view)
    for node_view in snapshot.nodes:
        count = here[node_view.node.ray_node_id]
        is_ready = node_view.node.state is NodeState.READY
        if count and is_ready and going[node_view.node.id] >= count and _is_alone(node_view, shape, count):
            yield node_view.node.id


def _is_alone(view: NodeView, shape: Shape, count: int) -> bool:
    """Whether nothing but so many replicas runs there."""
    each = whole_shares(shape.resources)
    theirs = {name: count * amount for name, amount in each.items()}
    return fits({name: total - view.available.get(name, 0.0) for name, total in view.countable.items()}, theirs)


def drains(snapshot: Snapshot) -> Iterator[Drain]:
    """Of the nodes that the endpoints' decisions gave up: their targets no longer count on the replicas there."""
    nodes = {view.node.id: view.node for view in snapshot.nodes}
    for view in snapshot.endpoints:
        for node_id in view.given_up:
            node = nodes[node_id]
            saved = format_usd(node.price_micro_usd_h)
            reason = f"endpoint {view.endpoint.name} has {view.endpoint.target_replicas} replicas without it"
            keep = Rejected(f"keep {node_id}", f"costs {saved}/h more", node.price_micro_usd_h)
            deadline_s = snapshot.at_s + DRAIN_S
            yield Drain(node_id, "notice", deadline_s, f"{reason}; saves {saved}/h", -node.price_micro_usd_h, (keep,))
