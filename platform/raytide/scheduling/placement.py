"""The search for a placement: existing nodes first, then the cheapest that can be bought. It reserves nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import NodeType, Resources, round_up_gpu_share
from raytide.core.objects.snapshot import NodeView, Snapshot, Throughputs
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
    menu: frozenset[str] | None = None
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
    left: Floats | None = None
    """How many of each pending shape are not yet counted on to fill the nodes that this buys."""

    @property
    def rating(self) -> tuple[int, float]:
        """Smaller is better: most members, then lowest cost."""
        costs = ((offer.cost_micro_usd_h * nodes, offer.node_type.name) for offer, nodes, _ in self.new)
        return -self.count, sum(cost_per_work(cost, name, self.paces) for cost, name in costs)

    def would_break(self, pace: int, needed: int) -> bool:
        """True if fewer members than needed would be placed with so few new nodes."""
        members = sum(members for _, members in self.existing)
        sizes = [members // nodes for _, nodes, members in self.new for _ in range(nodes)]
        return members + sum(sizes[:pace]) < needed


def best_candidate(
    market: Offerings, grid: NodeTable, seats: Sequence[Slot], coming: PendingDemand | None, want: PlacementRequest
) -> Candidate:
    """Places as many of the requested members as possible. `slots`: by row of the node table."""
    choice = Candidate(want.shape, paces=want.paces, left=None if coming is None else coming.remaining)
    looked_at = want.count if want.apart is None else sys.maxsize  # apart, many rows hold one each, whatever else fits
    rows, copies = grid.fitting(want.shape.resources, want.shape.labels, enough=looked_at)
    if want.apart is not None:
        rows = rows[[seats[row].node_id not in want.apart for row in rows.tolist()]]
        copies = np.ones_like(rows)
    for row, fit in zip(rows.tolist(), copies.tolist(), strict=True):
        if choice.count >= want.count:
            break
        choice.existing.append((row, min(fit, want.count - choice.count)))
        choice.count += choice.existing[-1][1]
    zones = None if want.spread_from is None else Counter(want.spread_from)
    if zones is not None:
        for row, members in choice.existing:
            zones[seats[row].zone] += members
    while choice.count < want.count and (want.max_new is None or choice.purchase.size < want.max_new):
        found = _cheapest(market, coming, want, choice, zones)
        if found is None:
            break
        offer, fit, nodes = found
        members = min(nodes * fit, want.count - choice.count)
        choice.new.append((offer, nodes, members))
        choice.purchase.add(offer, nodes)
        choice.count += members
        if zones is not None:
            zones[offer.zone] += members
    return choice


def spread_over(options: Sequence[Option], zone: Callable[[int], str], there: Counter[str]) -> Option:
    """The cheapest option; but while its zone holds more than half of the endpoint, one that costs little more in the
    zone with the fewest."""
    best = min(options)
    if there[zone(best[2])] * 2 <= there.total():
        return best
    near = [option for option in options if option[0] <= best[0] * (1 + SPREAD_EXTRA)]
    return min(near, key=lambda option: (there[zone(option[2])], option))


def _cheapest(
    market: Offerings,
    coming: PendingDemand | None,
    want: PlacementRequest,
    choice: Candidate,
    zones: Counter[str] | None,
) -> tuple[Offering, int, int] | None:
    """The best offering, the members that one of its nodes holds, and how many nodes to take at once. `zones`: members
    by zone if they are spread."""
    shelf, lacking = market.table, want.count - choice.count
    fits, to_be_had = shelf.members(want.shape), market.can_have(choice.purchase)
    fits = fits if want.apart is None else np.minimum(1, fits)
    rows = np.flatnonzero((fits > 0) & (to_be_had > 0) & shelf.allowed(want.menu))
    if not len(rows):
        return None
    members = np.minimum(fits, lacking)
    if coming is not None and choice.left is not None:
        worth, shared = coming.worth(want.shape.resources, rows, members[rows], choice.left)
    else:
        worth, shared = np.zeros(len(rows)), np.zeros((len(rows), 0))
    each = np.maximum(0.0, shelf.cost[rows] - worth) / members[rows]
    if want.paces:
        names = [shelf.offerings[row].node_type.name for row in rows.tolist()]
        each = np.array(
            [cost_per_work(cost, name, want.paces) for cost, name in zip(each.tolist(), names, strict=True)]
        )
    if zones is not None:
        options = list(zip(each.tolist(), shelf.cost[rows].tolist(), rows.tolist(), strict=True))
        row = spread_over(options, lambda row: shelf.offerings[row].zone, zones)[2]
        return shelf.offerings[row], int(fits[row]), 1
    at = int(np.lexsort((rows, shelf.cost[rows], each))[0])
    row = int(rows[at])
    nodes = min(max(1, lacking // int(fits[row])), int(to_be_had[row]))
    if want.max_new is not None:
        nodes = min(nodes, want.max_new - choice.purchase.size)
    if choice.left is not None and (there := shared[at] > 0).any():
        full = choice.left[there] // shared[at][there]
        nodes = int(min(nodes, max(1.0, full.min())))
        choice.left = np.maximum(0.0, choice.left - nodes * shared[at])
    return shelf.offerings[row], int(fits[row]), nodes


def resource_scale(node_types: Sequence[NodeType], nodes: Iterable[NodeView]) -> dict[str, float]:
    """The most of each resource on one node; infinite for resources that no node type has, so that leftovers of them do
    not count."""
    scale = dict.fromkeys(set().union(*(view.available for view in nodes)), float("inf"))
    names = {name for t in node_types for name in t.resources}
    return scale | {name: max(t.resources.get(name, 0.0) for t in node_types) for name in names}


def usual_shapes(snapshot: Snapshot) -> list[tuple[Resources, float]]:
    """The GPU shapes that most members have, running or waiting, each with its share of members."""
    said: Counter[tuple[tuple[str, float], ...]] = Counter()
    for lease in snapshot.leases:
        said[tuple(lease.shape.resources.items())] += len(lease.members)
    for job in snapshot.jobs:
        shape = job.spec.gang.shapes[0]
        said[tuple(shape.resources.items())] += shape.members
    for view in snapshot.endpoints:
        said[tuple(replica_shape(view).resources.items())] += published_members(view)
    counts: Counter[tuple[tuple[str, float], ...]] = Counter()
    for key, count in said.items():
        counts[tuple(sorted(key))] += count
    usual = [(dict(key), count) for key, count in counts.items() if count and dict(key).get(GPU)]
    usual = sorted(usual, key=lambda item: (-item[1], sorted(item[0].items())))[:USUAL]
    total = sum(count for _, count in usual)
    return [(round_up_gpu_share(need), count / total) for need, count in usual]
