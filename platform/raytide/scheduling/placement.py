"""Searches for a placement of members: on existing nodes first, then on the cheapest nodes that can be bought. The
search reserves nothing.

The search compares the costs of `offerings.py`, which include the risk of losing spot nodes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from raytide.core.objects.gang import Lease, Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import TYPE_LABEL, ZONE_LABEL, NodeType, Resources, round_up_gpu_share
from raytide.core.objects.snapshot import EndpointView, NodeView, Throughputs
from raytide.scheduling.lookahead import PendingDemand
from raytide.scheduling.node_table import GPU, Floats, NodeTable
from raytide.scheduling.offerings import Ints, Offering, Offerings, Purchase
from raytide.scheduling.replicas import published_members, replica_shape
from raytide.scheduling.throughput import cost_per_work

USUAL = 4
"""The number of shapes that represent the usual demand."""
SPREAD_EXTRA = 0.2
"""The extra cost that is accepted for a replica in another zone, as a share, while the cheapest zone has more than half
of the endpoint's replicas.
"""
COUNTS = 8
"""The number of different member counts that are considered for a node, evenly spaced, because a node may hold
thousands of small tasks.
"""

Option = tuple[float, float, int]
"""The cost of an offering per member and in total, and its row."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    shape: Shape
    count: int
    allowed_types: frozenset[str] | None = None
    max_new: int | None = None
    spread_from: Counter[str] | None = None
    paces: Throughputs = field(default_factory=dict)
    apart: frozenset[str] | None = None
    """The nodes that the members may not use, each member needing a separate node; None if members may share nodes."""


class Slot(NamedTuple):
    """The place of one member on a node. A node that is still to be bought already has an id, so that members can share
    it.
    """

    node_id: str
    node_type: str
    zone: str
    is_new: bool


class NewNodes(NamedTuple):
    """Nodes of one offering that are to be bought."""

    offering: Offering
    nodes: int
    members: int
    """The number of members on all of these nodes."""
    shared: Floats | None
    """For each pending shape, the number of members that still fit on each of these nodes; None without lookahead."""
    data_micro_usd_h: float = 0.0
    """The hourly cost of moving the data of all members to these nodes."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A member placed on a new node."""

    shape: Shape
    allowed_types: frozenset[str] | None
    """The node types that may be bought for it; None for all."""
    zone: str = ""
    """The zone in which it must stay, so that its endpoint stays spread; "" for any."""
    types: str = ""
    """The value of a label selector for the node types on which its work is no slower; "" for all."""
    is_apart: bool = False
    """True if it needs a node without other members of its group."""

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels that the member's node must have."""
        labels = {TYPE_LABEL: self.types, **self.shape.labels} if self.types else self.shape.labels
        return {**labels, ZONE_LABEL: self.zone} if self.zone else labels


@dataclass(slots=True)
class Candidate:
    """A possible placement."""

    shape: Shape
    existing: list[tuple[int, int]] = field(default_factory=list)
    """Rows of the node table, with the number of members placed on each."""
    new: list[NewNodes] = field(default_factory=list)
    purchase: Purchase = field(default_factory=Purchase)
    count: int = 0
    paces: Throughputs = field(default_factory=dict)
    remaining: Floats | None = None
    """For each pending shape, the number of members that are not yet expected to fit on the nodes of this placement."""

    @property
    def rating(self) -> tuple[int, float]:
        """The sort key of candidates. The candidate with the most members comes first, and among equals the
        cheapest.
        """
        costs = (
            (new.offering.cost_micro_usd_h * new.nodes + new.data_micro_usd_h, new.offering.node_type.name)
            for new in self.new
        )
        return -self.count, sum(cost_per_work(cost, name, self.paces) for cost, name in costs)

    def would_split(self, pace: int, needed: int) -> bool:
        """Returns True if launching only `pace` of the new nodes would place fewer than `needed` members."""
        members = sum(members for _, members in self.existing)
        sizes = [new.members // new.nodes for new in self.new for _ in range(new.nodes)]
        return members + sum(sizes[:pace]) < needed


def best_candidate(
    offerings: Offerings,
    node_table: NodeTable,
    slots: Sequence[Slot],
    pending: PendingDemand | None,
    request: PlacementRequest,
    needed: int,
) -> Candidate:
    """Returns the placement that holds as many of the requested members as possible.

    `slots[i]` is the slot on the node in row i of the node table. The placement launches no more nodes than may be
    launched now. It may exceed this limit if the `needed` members of a gang would otherwise be split.
    """
    candidate = _most_members(offerings, node_table, slots, pending, request)
    left = None if offerings.launches_left is None else max(0, offerings.launches_left)
    if left is None or candidate.purchase.size <= left or (left and candidate.would_split(left, needed)):
        return candidate
    return _most_members(offerings, node_table, slots, pending, replace(request, max_new=left))


def _most_members(
    offerings: Offerings,
    node_table: NodeTable,
    slots: Sequence[Slot],
    pending: PendingDemand | None,
    request: PlacementRequest,
) -> Candidate:
    candidate = Candidate(request.shape, paces=request.paces, remaining=None if pending is None else pending.remaining)
    enough = (
        request.count if request.apart is None else sys.maxsize
    )  # apart, many rows hold one each, whatever else fits
    rows, copies = node_table.fitting(request.shape.resources, request.shape.labels, enough=enough)
    if request.apart is not None:
        rows = rows[[slots[row].node_id not in request.apart for row in rows.tolist()]]
        copies = np.ones_like(rows)
    for row, fit in zip(rows.tolist(), copies.tolist(), strict=True):
        if candidate.count >= request.count:
            break
        candidate.existing.append((row, min(fit, request.count - candidate.count)))
        candidate.count += candidate.existing[-1][1]
    zones = None if request.spread_from is None else Counter(request.spread_from)
    if zones is not None:
        for row, members in candidate.existing:
            zones[slots[row].zone] += members
    while candidate.count < request.count and (request.max_new is None or candidate.purchase.size < request.max_new):
        found = _cheapest(offerings, pending, request, candidate, zones)
        if found is None:
            break
        if request.shape.inputs:
            data = offerings.table.data_cost((request.shape,))[found.offering.row] * found.members
            found = found._replace(data_micro_usd_h=float(data))
        candidate.new.append(found)
        candidate.purchase.add(found.offering, found.nodes)
        candidate.count += found.members
        if zones is not None:
            zones[found.offering.zone] += found.members
    return candidate


def spread_over(options: Sequence[Option], zone: Callable[[int], str], by_zone: Counter[str]) -> Option:
    """Returns one of the options: normally the cheapest one. If the zone of this option already has more than half of
    the endpoint's members, slightly more expensive options also count (see SPREAD_EXTRA). The function then returns the
    option whose zone has the fewest members.

    An option is a tuple that begins with its cost and ends with an index. `zone` returns the zone of an index.
    """
    best = min(options)
    if by_zone[zone(best[2])] * 2 <= by_zone.total():
        return best
    near = [option for option in options if option[0] <= best[0] * (1 + SPREAD_EXTRA)]
    return min(near, key=lambda option: (by_zone[zone(option[2])], option))


def _cheapest(
    offerings: Offerings,
    pending: PendingDemand | None,
    request: PlacementRequest,
    candidate: Candidate,
    zones: Counter[str] | None,
) -> NewNodes | None:
    """Returns the nodes to take next: those that cost least for what they would hold, including pending demand.

    `zones` has the number of members by zone, if members are to be spread. A pending member counts as the number of
    members of this shape that could be bought for its price on a separate node. A node with fewer members of this shape
    may hold more pending ones, so several numbers are compared.
    """
    table, lacking = offerings.table, request.count - candidate.count
    fits, purchasable = table.members(request.shape), offerings.purchasable(candidate.purchase)
    fits = fits if request.apart is None else np.minimum(1, fits)
    rows = np.flatnonzero((fits > 0) & (purchasable > 0) & table.allowed(request.allowed_types))
    if not len(rows):
        return None
    members = np.minimum(fits[rows], lacking)
    worth, shared = members.astype(np.float64), None
    if pending is not None and candidate.remaining is not None and candidate.remaining.any():
        alone = (table.cost[rows] / fits[rows]).min()
        rows, members = _with_fewer_members(rows, members)
        value, shared = pending.value(request.shape.resources, rows, members, candidate.remaining)
        worth = members + value / max(1.0, alone)
    each = table.cost[rows] / worth
    if request.shape.inputs:
        each = each + table.data_cost((request.shape,))[rows] * members / worth
    if request.paces:
        names = [table.offerings[row].node_type.name for row in rows.tolist()]
        each = np.array(
            [cost_per_work(cost, name, request.paces) for cost, name in zip(each.tolist(), names, strict=True)]
        )
    if zones is not None:
        options = list(zip(each.tolist(), table.cost[rows].tolist(), range(len(rows)), strict=True))
        at = spread_over(options, lambda at: table.offerings[rows[at]].zone, zones)[2]
        return NewNodes(table.offerings[rows[at]], 1, int(members[at]), None)
    at = int(np.lexsort((rows, table.cost[rows], each))[0])
    row, fit = int(rows[at]), int(members[at])
    nodes = min(lacking // fit, int(purchasable[row]))
    if request.max_new is not None:
        nodes = min(nodes, request.max_new - candidate.purchase.size)
    if shared is not None and (filled := shared[at] > 0).any():
        assert candidate.remaining is not None
        nodes = int(min(nodes, (candidate.remaining[filled] // shared[at][filled]).min()))
        candidate.remaining = candidate.remaining - nodes * shared[at]
    return NewNodes(table.offerings[row], nodes, nodes * fit, None if shared is None else shared[at])


def _with_fewer_members(rows: Ints, members: Ints) -> tuple[Ints, Ints]:
    """Returns each row once for every number of members to consider, from `members` down, and these numbers."""
    counts = np.minimum(members, COUNTS)
    step = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    rows, members, counts = (np.repeat(each, counts) for each in (rows, members, counts))
    return rows, members - members * step // counts


def resource_scale(node_types: Sequence[NodeType], nodes: Iterable[NodeView]) -> dict[str, float]:
    """Returns the largest amount of each resource on any one node.

    The amount is infinite for resources that no node type has. A free amount that is divided by the infinite amount
    therefore counts as zero.
    """
    scale = dict.fromkeys(set().union(*(view.available for view in nodes)), float("inf"))
    names = {name for t in node_types for name in t.resources}
    return scale | {name: max(t.resources.get(name, 0.0) for t in node_types) for name in names}


def usual_shapes(
    leases: Iterable[Lease], jobs: Iterable[Job], endpoints: Iterable[EndpointView]
) -> list[tuple[Resources, float]]:
    """Returns the most frequent resource requests of members with GPUs, each with its share. The share is the number of
    members that make this request, divided by the number of members that make any of the returned requests. Running and
    waiting members count.
    """
    counted: Counter[tuple[tuple[str, float], ...]] = Counter()
    for lease in leases:
        counted[tuple(lease.shape.resources.items())] += len(lease.members)
    for job in jobs:
        shape = job.spec.gang.shapes[0]
        counted[tuple(shape.resources.items())] += shape.members
    for view in endpoints:
        counted[tuple(replica_shape(view).resources.items())] += published_members(view)
    counts: Counter[tuple[tuple[str, float], ...]] = Counter()
    for key, count in counted.items():
        counts[tuple(sorted(key))] += count
    usual = [(dict(key), count) for key, count in counts.items() if count and dict(key).get(GPU)]
    usual = sorted(usual, key=lambda item: (-item[1], sorted(item[0].items())))[:USUAL]
    total = sum(count for _, count in usual)
    return [(round_up_gpu_share(need), count / total) for need, count in usual]
