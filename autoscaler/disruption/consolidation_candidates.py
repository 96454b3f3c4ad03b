"""New moves: who would cost less elsewhere, and whether it pays to go there.

A move must pay back within `PAYBACK_S`, and a gang's within the time for which it has stood as it does: whoever was
moved is left alone for as long as that cost. Of gangs only those move that may be preempted, or that are elastic and
keep their minimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from raytide.autoscaler.disruption.disruption_cost import NOTICE_S, DisruptionCost, disruption_cost
from raytide.autoscaler.disruption.market_migration import constraint_of
from raytide.autoscaler.disruption.rescheduling import ReschedulingSimulator
from raytide.autoscaler.nodes.occupancy import Tenants
from raytide.autoscaler.provisioning.alternatives import rejected
from raytide.autoscaler.provisioning.plan_builder import PlanBuilder
from raytide.core.money import format_usd
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import NodeState
from raytide.core.objects.plan import Drain, Launch, Rejected
from raytide.core.objects.snapshot import NodeView
from raytide.scheduling.offerings import Floats, Ints, Offering
from raytide.scheduling.placement import spread_over
from raytide.scheduling.replicas import is_fresh

MOVE = "move "
PAYBACK_S = 3600.0
OVERLAP_S = 300.0
"""How long both nodes are paid for: the start of the new one, and the drain of the old one."""
DRAIN_S = 600.0
"""Requests that go on for longer on the old node are cut off."""
MAX_LEAVING_SHARE = 0.1
"""Of all nodes, at once; one may always, and all of one gang."""

_Price = TypeVar("_Price", float, Floats)


@dataclass(frozen=True, slots=True)
class _Purchase:
    old: Tenants
    offer: Offering
    cost_micro_usd_h: float
    """Of the new node, with what its loss would cost those who move there."""


class ConsolidationPlanner:
    """At most so many nodes as may be left at once, the dearest first. `coming`: replacements, by the node that
    they are for."""

    def __init__(self, builder: PlanBuilder, coming: Mapping[str, NodeView]) -> None:
        self.builder, self.now_s = builder, builder.snapshot.at_s
        nodes = builder.snapshot.nodes
        leaving = sum(view.node.state is NodeState.DRAINING for view in nodes)
        self.budget = max(1, int(MAX_LEAVING_SHARE * len(nodes))) - leaving - len(coming)
        self.leaving = set(coming)
        self.destination_zones = {node_id: view.node.zone for node_id, view in coming.items()}
        """The zone to which the occupants of a node move."""
        there, gone = (NodeState.READY, NodeState.LAUNCHING), builder.leaving | self.leaving
        self.spare = Counter(view.node.type for view in nodes if view.node.state in there and view.node.id not in gone)
        self.spare.subtract({node_type.name: node_type.min_nodes for node_type in builder.snapshot.node_types})
        """How many of each type may be left."""
        self._offers: dict[tuple[object, ...], Ints] = {}

    @cached_property
    def simulator(self) -> ReschedulingSimulator:
        refuge = ReschedulingSimulator(self.builder.state)
        refuge.exclude(self.leaving)
        return refuge

    def decide(self) -> Iterator[Drain | Launch]:
        views = [view for view in self.builder.snapshot.nodes if self._may_go(view)] if self.budget > 0 else []
        for view in sorted(views, key=_dearest_first):
            if self.budget <= 0:
                return
            old = self.builder.occupancy.tenants_of(view)
            if self._may_go(view) and self._may_leave(old):
                yield from self._move(old)

    def _move(self, old: Tenants) -> Sequence[Drain | Launch]:
        if not len(self._offers_for(old)) and not self.simulator.could_fit(old):
            return ()
        for olds, stop in self._gang_groups(old):
            if not self._is_within(olds):
                return ()  # their turn comes, and then they go in one stop
            if self._may_be_left(olds) and (actions := self._to_free_room(olds, stop) or self._buy(olds, stop)):
                self.leaving.update(one.view.node.id for one in olds)
                self.simulator.exclude(one.view.node.id for one in olds)
                self.budget -= len(olds)
                for one in olds:
                    self.spare[one.view.node.type] -= 1
                return actions
        return ()

    def _may_go(self, view: NodeView) -> bool:
        """As far as can be told without asking who is there."""
        node, least_s = view.node, self.builder.snapshot.limits.moves_after_s
        if node.state is not NodeState.READY or view.is_draining or node.ready_at_s is None or least_s is None:
            return False
        is_needed = node.id in self.leaving or node.id in self.builder.nominated or self.spare[node.type] <= 0
        return not is_needed and self.now_s - node.ready_at_s >= least_s

    def _may_leave(self, old: Tenants) -> bool:
        """Where gangs with a deadline sit is decided with that in view: see market_moves."""
        return may_leave(old, self.now_s) and constraint_of(self.builder.snapshot, old) is None

    def _is_within(self, olds: Sequence[Tenants]) -> bool:
        """A gang on more nodes than may leave at once moves when nobody else does."""
        return len(olds) <= self.budget or not self.leaving

    def _may_be_left(self, olds: Sequence[Tenants]) -> bool:
        leaving = Counter(old.view.node.type for old in olds)
        return all(self.spare[name] >= count for name, count in leaving.items())

    def _gang_groups(self, old: Tenants) -> Iterator[tuple[tuple[Tenants, ...], DisruptionCost]]:
        """The node with those of its gang that would cost less elsewhere and can go in the same stop; then it alone."""
        roster = self.builder.occupancy
        if (alone := disruption_cost(roster, (old,), self.now_s)) is None:
            return
        party: tuple[Tenants, ...] = (old,)
        stop = alone
        nodes = {member.node_id for lease, _ in old.members for member in lease.members} - {old.view.node.id}
        fellows = [roster.views[node_id] for node_id in nodes if node_id in roster.views]
        for view in sorted(fellows if len(self._offers_for(old)) else (), key=_dearest_first):
            other = roster.tenants_of(view)
            if not self._may_go(view) or not self._may_leave(other) or not len(self._offers_for(other)):
                continue
            with_it = disruption_cost(roster, (*party, other), self.now_s)
            if with_it is not None and with_it.in_place == alone.in_place:
                party, stop = (*party, other), with_it
        yield party, stop
        if len(party) > 1:
            yield (old,), alone

    def _to_free_room(self, olds: Sequence[Tenants], stop: DisruptionCost) -> list[Drain | Launch]:
        """All of them fit on other nodes that are ready and stay."""
        saved = sum(old.price_micro_usd_h for old in olds)
        if not _pays_back(saved, stop.cost_micro_usd, stop) or (seats := self.simulator.place(olds)) is None:
            return []
        self.builder.nominated.update(seat.node_id for seat in seats)
        found: list[Drain | Launch] = []
        for old in olds:
            theirs, seats = seats[: len(old.shapes)], seats[len(old.shapes) :]
            where = ", ".join(dict.fromkeys(seat.node_id for seat in theirs))
            reason = f"{old.description} fit on {where}; saves {format_usd(old.price_micro_usd_h)}/h"
            if stop.description:
                reason += f"; the move costs {format_usd(round(stop.cost_micro_usd))} as {stop.description}"
            found.append(drain_of(old, reason, old.price_micro_usd_h, self.now_s))
        return found

    def _buy(self, olds: Sequence[Tenants], stop: DisruptionCost) -> list[Drain | Launch]:
        """The cheapest nodes that would hold them, if the move pays back."""
        market, purchases = self.builder.state.offerings, list[_Purchase]()
        for old in olds:
            if (found := self._purchase(old, len(olds) - 1, stop)) is not None:
                purchases.append(found)
                market.buy(found.offer)
        for purchase in purchases:
            market.cancel(purchase.offer)
        cost = sum(_overlap(p.old.price_micro_usd_h, p.offer.price_micro_usd_h) for p in purchases)
        cost += stop.cost_micro_usd
        saved = sum(p.old.price_micro_usd_h - p.cost_micro_usd_h for p in purchases)
        if len(purchases) < len(olds) or not _pays_back(saved, cost, stop):
            return []
        self._offers.clear()
        return [self._launch(purchase, cost, stop) for purchase in purchases]

    def _purchase(self, old: Tenants, others: int, stop: DisruptionCost) -> _Purchase | None:
        """`others`: how many nodes are bought beside it, at about its price."""
        shelf, rows = self.builder.state.offerings.table, self._offers_for(old)
        if not len(rows := rows[self.builder.state.offerings.can_have()[rows] > 0]):
            return None
        at_risk = stop.staying_micro_usd_h + others * shelf.price[rows]
        costs = shelf.cost[rows] + shelf.reclaims_per_h[rows] * stop.lost_h * at_risk
        best = int(costs.argmin())
        if old.replicas:
            options = [(cost, cost, at) for at, cost in enumerate(costs.tolist())]
            best = spread_over(options, lambda at: shelf.offerings[rows[at]].zone, self._zones_of(old))[2]
        return _Purchase(old, shelf.offerings[rows[best]], float(costs[best]))

    def _offers_for(self, old: Tenants) -> Ints:
        """Those that hold all of its occupants, and can be had, by row; none when none would pay back the time in which
        both nodes are paid for."""
        if old.shape_key not in self._offers:
            market = self.builder.state.offerings
            able = (market.table.members(Shape.computed(old.resources, {})) > 0) & (market.can_have() > 0)
            for labels in {tuple(shape.labels.items()) for shape in old.shapes}:
                able &= market.table.matching(dict(labels))
            has_pace = market.launches_left is None or market.launches_left > 0
            self._offers[old.shape_key] = np.flatnonzero(able & has_pace)
        shelf, found, price = self.builder.state.offerings.table, self._offers[old.shape_key], old.price_micro_usd_h
        pays = (price - shelf.cost[found]) * PAYBACK_S > _overlap(price, shelf.price[found].astype(float)) * 3600.0
        return found if pays.any() else found[:0]

    def _zones_of(self, old: Tenants) -> Counter[str]:
        """Where the other replicas of its endpoints are, or are moving to."""
        roster, here = self.builder.occupancy, old.view.node.ray_node_id
        hosts = [
            roster.in_ray[node]
            for name, endpoint in {e.endpoint.name: e for e in old.replicas}.items()
            if name and endpoint.load
            for node in endpoint.load.replica_nodes
            if node in roster.in_ray and node != here
        ]
        return Counter(self.destination_zones.get(view.node.id, view.node.zone) for view in hosts)

    def _launch(self, purchase: _Purchase, cost_micro_usd: float, stop: DisruptionCost) -> Launch:
        old, offer, room = purchase.old, purchase.offer, self.builder.state
        node, saved = old.view.node, old.price_micro_usd_h - offer.price_micro_usd_h
        asked = Shape.computed(old.resources, old.shapes[0].labels)
        others = rejected(room.offerings, asked, 1, offer)
        seat = room.buy_offer(offer)
        room.reserve(seat.node_id, old.resources)
        self.builder.nominated.add(seat.node_id)
        self.destination_zones[node.id] = offer.zone
        price = f"{offer.node_type.market} at {format_usd(offer.price_micro_usd_h)}/h"
        reason = f"{offer.name} ({price}) holds {old.description} of "
        reason += f"{node.id} for {format_usd(saved)}/h less; the move costs {format_usd(round(cost_micro_usd))}"
        reason += f" as {stop.description}" if stop.description else ""
        stay = Rejected(f"stay on {node.id}", f"costs {format_usd(saved)}/h more", saved)
        subject = f"{MOVE}{node.id}"
        return Launch(
            seat.node_id, seat.node_type, seat.zone, subject, reason, offer.price_micro_usd_h, (stay, *others)
        )


def may_leave(old: Tenants, now_s: float) -> bool:
    """Whether it is known who is there, and that they are replicas or gangs and nobody else."""
    if any(endpoint.worth is not None for endpoint in old.replicas):
        return False  # the serving policy decides where they are: see live_fleet
    if any(endpoint.endpoint.spec.members > 1 for endpoint in old.replicas):
        return False  # Serve cannot move one of a replica's members
    is_one_kind = bool(old.replicas) != bool(old.members)
    return (
        is_one_kind and all(is_fresh(endpoint.load, now_s) for endpoint in old.replicas) and old.accounts_for_all_usage
    )


def drain_of(old: Tenants, reason: str, saved_micro_usd_h: int, now_s: float) -> Drain:
    node_id, more = old.view.node.id, f"costs {format_usd(saved_micro_usd_h)}/h more"
    deadline_s = now_s + (NOTICE_S if old.members else DRAIN_S)
    stay = Rejected(f"stay on {node_id}", more, saved_micro_usd_h)
    return Drain(node_id, "notice", deadline_s, reason, -old.price_micro_usd_h, (stay,))


def _overlap(price_micro_usd_h: int, other_micro_usd_h: _Price) -> _Price:
    """What it costs that both nodes are paid for a while."""
    return (price_micro_usd_h + other_micro_usd_h) * OVERLAP_S / 3600.0


def _pays_back(saved_micro_usd_h: float, cost_micro_usd: float, stop: DisruptionCost) -> bool:
    return saved_micro_usd_h * min(PAYBACK_S, stop.stable_s) > cost_micro_usd * 3600.0


def _dearest_first(view: NodeView) -> tuple[int, str]:
    return -view.node.price_micro_usd_h, view.node.id
