"""What is asked of the fleet: one placement, what is usual, and why a placement cannot be had now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raytide.core.clock import utc
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import NodeType, Resources, round_up_gpu_share
from raytide.core.objects.snapshot import NodeView, Snapshot, Throughputs
from raytide.scheduling.diagnosis import Unschedulable, amounts
from raytide.scheduling.market import Offerings
from raytide.scheduling.node_table import GPU
from raytide.scheduling.replicas import members_of, replica_shape

USUAL = 4
"""How many shapes stand for what is usually asked."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    shape: Shape
    count: int
    menu: frozenset[str] | None = None
    max_new: int | None = None
    spread_from: Counter[str] | None = None
    paces: Throughputs = field(default_factory=dict)
    apart: frozenset[str] | None = None
    """Each member sits on a node of its own, and on none of these; None: they may share."""


def resource_scale(node_types: Sequence[NodeType], nodes: Iterable[NodeView]) -> dict[str, float]:
    """The most of each resource on one node; what no node type has counts for nothing when it is left over."""
    scale = dict.fromkeys(set().union(*(view.available for view in nodes)), float("inf"))
    names = {name for t in node_types for name in t.resources}
    return scale | {name: max(t.resources.get(name, 0.0) for t in node_types) for name in names}


def usual_shapes(snapshot: Snapshot) -> list[tuple[Resources, float]]:
    """The GPU shapes that most members have, running and waiting, with the share of each."""
    said: Counter[tuple[tuple[str, float], ...]] = Counter()
    for lease in snapshot.leases:
        said[tuple(lease.shape.resources.items())] += len(lease.members)
    for job in snapshot.jobs:
        shape = job.spec.gang.shapes[0]
        said[tuple(shape.resources.items())] += shape.members
    for view in snapshot.endpoints:
        said[tuple(replica_shape(view).resources.items())] += members_of(view)
    counts: Counter[tuple[tuple[str, float], ...]] = Counter()
    for key, count in said.items():
        counts[tuple(sorted(key))] += count
    usual = [(dict(key), count) for key, count in counts.items() if count and dict(key).get(GPU)]
    usual = sorted(usual, key=lambda item: (-item[1], sorted(item[0].items())))[:USUAL]
    total = sum(count for _, count in usual)
    return [(round_up_gpu_share(need), count / total) for need, count in usual]


def why_not(market: Offerings, held_by: Holders, shape: Shape, count: int, there: int, subject: str) -> Unschedulable:
    """Of a placement that is possible at all. `there`: how many members fit on nodes that are there or coming."""
    holding = market.holding(shape)
    types = {offer.node_type.name: (offer.node_type, fit) for offer, fit in holding}
    resting = [offer for offer, _ in holding if market.retry_at_s(offer) > market.at_s]
    rested = {offer.node_type.name for offer, _ in holding if offer not in resting}
    buyable = {name: max(0, market.left_of(name)) * fit for name, (_, fit) in types.items()}
    now = there + sum(many for name, many in buyable.items() if name in rested)
    needs = f"needs {count} x ({amounts(shape)}), {min(now, count)} fit now"
    if now < count and now + sum(many for name, many in buyable.items() if name not in rested) >= count:
        retry_at_s = min(market.retry_at_s(offer) for offer in resting)
        out = {name for name, many in buyable.items() if many and name not in rested}
        waiting = [offer.name for offer in resting if offer.node_type.name in out]
        return Unschedulable(
            "stock",
            f"{subject} waits for nodes: {needs}; the provider had no {', '.join(waiting)}; "
            f"asked again at {utc(retry_at_s)}.",
            "Allow another shape, add a zone or a node type, or wait.",
        )
    if now >= count and not shape.together and market.launches_left == 0:
        pace = f"{market.limits.launches_per_min} nodes were launched within a minute (metadata.raytide.limits)"
        return Unschedulable("rate", f"{subject} waits: it {needs}; {pace}.", "Nothing to do: it goes on in a minute.")
    if now >= count and not shape.together and (limits := market.limits_in_words()):
        remedy = "It starts when something else ends. To start now, raise metadata.raytide.limits."
        return Unschedulable("budget", f"{subject} waits: it {needs.partition(',')[0]}; {limits}.", remedy)
    names = " or ".join(types)
    if shape.together:
        where = shape.together.removeprefix("ray.io/")
        needs = f"needs {count} x ({amounts(shape)}) in one {where}; no one has room for all of them"
    held = held_by.of(tuple(types))
    by = f"; {', '.join(types)} is held by {', '.join(held[:5])}" if held else ""
    more = f" and {len(held) - 5} more" if len(held) > 5 else ""
    return Unschedulable(
        "capacity",
        f"{subject} waits for room: {needs}{by}{more}.",
        f"It starts when they end. To start now, raise max_nodes of {names}.",
    )


class Holders:
    """Who holds something on nodes of each type."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._of_type, self._said = _holders(snapshot), dict[tuple[str, ...], list[str]]()

    def of(self, types: tuple[str, ...]) -> list[str]:
        """On those of all these types, in order."""
        if types not in self._said:
            self._said[types] = sorted(set().union(*(self._of_type.get(name, set()) for name in types)))
        return self._said[types]


def _holders(snapshot: Snapshot) -> dict[str, set[str]]:
    type_of = {view.node.id: view.node.type for view in snapshot.nodes}
    type_of_ray = {view.node.ray_node_id: view.node.type for view in snapshot.nodes if view.node.ray_node_id}
    found: dict[str, set[str]] = {name: set() for name in type_of.values()}
    for lease in snapshot.leases:
        for member in lease.members:
            if member.node_id in type_of:
                found[type_of[member.node_id]].add(lease.job_id)
    for view in snapshot.endpoints:
        for node in view.load.replica_nodes if view.load else ():
            if node in type_of_ray:
                found[type_of_ray[node]].add(view.endpoint.name)
    for name, kept in snapshot.kept.items():
        for node_id, _ in kept:
            found[type_of[node_id]].add(name)
    return found
