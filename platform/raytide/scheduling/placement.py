"""The search for a placement: existing nodes first, then the cheapest that can be bought. It reserves nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from raytide.core.objects.gang import Lease, Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import NodeType, Resources, round_up_gpu_share
from raytide.core.objects.snapshot import EndpointView, NodeView, Throughputs
from raytide.scheduling.lookahead import PendingDemand
from raytide.scheduling.node_table import GPU, Floats, NodeTable
from raytide.scheduling.offerings import Offering, Offerings, Purchase
from raytide.scheduling.replicas import published_members, replica_shape
from raytide.scheduling.throughput import cost_per_work

USUAL = 4
"""The number of shapes that stand for the usual demand."""
SPREAD_EXTRA = 0.2
"""The extra cost that a replica in another zone may have, while one zone holds half of its endpoint or more."""

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
    """Each member needs a node of its own, and none of these; None if members may share nodes."""


class Slot(NamedTuple):
    """The place of one member. A new node already has its id, so that members can share it."""

    node_id: str
    node_type: str
    zone: str
    is_new: bool


@dataclass(slots=True)
class Candidate:
    """A possible placement."""

    shape: Shape
    existing: list[tuple[int, int]] = field(default_factory=list)
    """Rows of the node table, with members."""
    new: list[tuple[Offering, int, int]] = field(default_factory=list)
    """Offerings, with nodes and members."""
    purchase: Purchase = field(default_factory=Purchase)
    count: int = 0
    paces: Throughputs = field(default_factory=dict)
    remaining: Floats | None = None
    """The members of each pending shape that are not yet counted on to fill the nodes that this buys."""

    @property
    def rating(self) -> tuple[int, float]:
        """Smaller is better: most members, then lowest cost."""
        costs = ((offering.cost_micro_usd_h * nodes, offering.node_type.name) for offering, nodes, _ in self.new)
        return -self.count, sum(cost_per_work(cost, name, self.paces) for cost, name in costs)

    def would_split(self, pace: int, needed: int) -> bool:
        """Returns True if fewer members than needed would be placed with so few new nodes."""
        members = sum(members for _, members in self.existing)
        sizes = [members // nodes for _, nodes, members in self.new for _ in range(nodes)]
        return members + sum(sizes[:pace]) < needed


def best_candidate(
    offerings: Offerings,
    node_table: NodeTable,
    slots: Sequence[Slot],
    pending: PendingDemand | None,
    request: PlacementRequest,
) -> Candidate:
    """Places as many of the requested members as possible. `slots`: by row of the node table."""
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
        offering, fit, nodes = found
        members = min(nodes * fit, request.count - candidate.count)
        candidate.new.append((offering, nodes, members))
        candidate.purchase.add(offering, nodes)
        candidate.count += members
        if zones is not None:
            zones[offering.zone] += members
    return candidate


def spread_over(options: Sequence[Option], zone: Callable[[int], str], by_zone: Counter[str]) -> Option:
    """Returns the cheapest option; but while its zone holds more than half of the endpoint, one that costs little more
    in the zone with the fewest."""
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
) -> tuple[Offering, int, int] | None:
    """Returns the best offering, the members that one of its nodes holds, and how many nodes to take at once. `zones`:
    members by zone if they are spread."""
    table, lacking = offerings.table, request.count - candidate.count
    fits, purchasable = table.members(request.shape), offerings.purchasable(candidate.purchase)
    fits = fits if request.apart is None else np.minimum(1, fits)
    rows = np.flatnonzero((fits > 0) & (purchasable > 0) & table.allowed(request.allowed_types))
    if not len(rows):
        return None
    members = np.minimum(fits, lacking)
    if pending is not None and candidate.remaining is not None:
        value, shared = pending.value(request.shape.resources, rows, members[rows], candidate.remaining)
    else:
        value, shared = np.zeros(len(rows)), np.zeros((len(rows), 0))
    each = np.maximum(0.0, table.cost[rows] - value) / members[rows]
    if request.paces:
        names = [table.offerings[row].node_type.name for row in rows.tolist()]
        each = np.array(
            [cost_per_work(cost, name, request.paces) for cost, name in zip(each.tolist(), names, strict=True)]
        )
    if zones is not None:
        options = list(zip(each.tolist(), table.cost[rows].tolist(), rows.tolist(), strict=True))
        row = spread_over(options, lambda row: table.offerings[row].zone, zones)[2]
        return table.offerings[row], int(fits[row]), 1
    at = int(np.lexsort((rows, table.cost[rows], each))[0])
    row = int(rows[at])
    nodes = min(max(1, lacking // int(fits[row])), int(purchasable[row]))
    if request.max_new is not None:
        nodes = min(nodes, request.max_new - candidate.purchase.size)
    if candidate.remaining is not None and (filled := shared[at] > 0).any():
        full = candidate.remaining[filled] // shared[at][filled]
        nodes = int(min(nodes, max(1.0, full.min())))
        candidate.remaining = np.maximum(0.0, candidate.remaining - nodes * shared[at])
    return table.offerings[row], int(fits[row]), nodes


def resource_scale(node_types: Sequence[NodeType], nodes: Iterable[NodeView]) -> dict[str, float]:
    """Returns the most of each resource on one node; infinite for resources that no node type has, so that leftovers of
    them do not count."""
    scale = dict.fromkeys(set().union(*(view.available for view in nodes)), float("inf"))
    names = {name for t in node_types for name in t.resources}
    return scale | {name: max(t.resources.get(name, 0.0) for t in node_types) for name in names}


def usual_shapes(
    leases: Iterable[Lease], jobs: Iterable[Job], endpoints: Iterable[EndpointView]
) -> list[tuple[Resources, float]]:
    """Returns the GPU shapes that most members have, running or waiting, each with its share of members."""
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
