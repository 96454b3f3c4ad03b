"""Finds consolidation candidates: tenants that would cost less on other nodes. Checks for each candidate that the move
pays back.

A move must pay back within `PAYBACK_S`. The move of a gang must also pay back within the time for which the gang has
been stable. After an expensive move, a gang is therefore left alone for longer. A gang may move if it is
preemptible. An elastic gang may also move if it keeps its minimum of members during the move.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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
"""The time for which both nodes are paid: the start of the new one and the drain of the old one."""
DRAIN_S = 600.0
"""The time that requests on the old node have to end; requests that take longer are cut off."""
MAX_LEAVING_SHARE = 0.1
"""The share of all nodes that may leave at once; one node always may, and all nodes of one gang."""

_Price = TypeVar("_Price", float, Floats)


@dataclass(frozen=True, slots=True)
class _Purchase:
    old: Tenants
    offering: Offering
    cost_micro_usd_h: float
    """The cost of the new node, including the expected cost of its loss."""


class ConsolidationPlanner:
    """Starts to move tenants away from nodes, beginning with the most expensive nodes. The number of nodes that may
    leave at once is limited.
    """

    def __init__(self, builder: PlanBuilder) -> None:
        self.builder, self.now_s = builder, builder.snapshot.at_s
        replacements = builder.replacements
        nodes = builder.snapshot.nodes
        leaving = sum(view.node.state is NodeState.DRAINING for view in nodes)
        self.budget = max(1, int(MAX_LEAVING_SHARE * len(nodes))) - leaving - len(replacements)
        self.leaving = set(replacements)
        self.destination_zones = {node_id: view.node.zone for node_id, view in replacements.items()}
        """Keyed by the id of the node that is left."""
        there, gone = (NodeState.READY, NodeState.LAUNCHING), builder.leaving | self.leaving
        self.spare = Counter(view.node.type for view in nodes if view.node.state in there and view.node.id not in gone)
        self.spare.subtract({node_type.name: node_type.min_nodes for node_type in builder.snapshot.node_types})
        """Nodes that may leave, by type."""
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
        for olds, disruption in self._gang_groups(old):
            if not self._is_within(olds):
                return ()  # they move later, in one stop
            if self._may_be_left(olds) and (
                actions := self._to_free_room(olds, disruption) or self._buy(olds, disruption)
            ):
                self.leaving.update(one.view.node.id for one in olds)
                self.simulator.exclude(one.view.node.id for one in olds)
                self.budget -= len(olds)
                for one in olds:
                    self.spare[one.view.node.type] -= 1
                return actions
        return ()

    def _may_go(self, view: NodeView) -> bool:
        """Returns whether the node may be left, as far as that does not depend on its tenants."""
        node, least_s = view.node, self.builder.snapshot.limits.moves_after_s
        if node.state is not NodeState.READY or view.is_draining or node.ready_at_s is None or least_s is None:
            return False
        is_needed = node.id in self.leaving or node.id in self.builder.nominated or self.spare[node.type] <= 0
        return not is_needed and self.now_s - node.ready_at_s >= least_s

    def _may_leave(self, old: Tenants) -> bool:
        """Returns whether the tenants may leave their node. Gangs with a deadline are placed by market_migration.py."""
        return may_leave(old, self.now_s) and constraint_of(self.builder.snapshot, old) is None

    def _is_within(self, olds: Sequence[Tenants]) -> bool:
        """Returns whether these tenants may leave now. A gang on more nodes than the limit may leave only while no
        other node leaves.
        """
        return len(olds) <= self.budget or not self.leaving

    def _may_be_left(self, olds: Sequence[Tenants]) -> bool:
        leaving = Counter(old.view.node.type for old in olds)
        return all(self.spare[name] >= count for name, count in leaving.items())

    def _gang_groups(self, old: Tenants) -> Iterator[tuple[tuple[Tenants, ...], DisruptionCost]]:
        """Yields the node together with the gang's other nodes that gain too and can leave in the same stop; then the
        node alone.
        """
        occupancy = self.builder.occupancy
        if (alone := disruption_cost(occupancy, (old,), self.now_s)) is None:
            return
        group: tuple[Tenants, ...] = (old,)
        disruption = alone
        nodes = {member.node_id for lease, _ in old.members for member in lease.members} - {old.view.node.id}
        gang_tenants = [occupancy.views[node_id] for node_id in nodes if node_id in occupancy.views]
        for view in sorted(gang_tenants if len(self._offers_for(old)) else (), key=_dearest_first):
            other = occupancy.tenants_of(view)
            if not self._may_go(view) or not self._may_leave(other) or not len(self._offers_for(other)):
                continue
            with_it = disruption_cost(occupancy, (*group, other), self.now_s)
            if with_it is not None and with_it.in_place == alone.in_place:
                group, disruption = (*group, other), with_it
        yield group, disruption
        if len(group) > 1:
            yield (old,), alone

    def _to_free_room(self, olds: Sequence[Tenants], disruption: DisruptionCost) -> list[Drain | Launch]:
        """Drains the old nodes if all their tenants fit on other nodes that are ready and stay."""
        saved = sum(old.price_micro_usd_h for old in olds)
        if (
            not _pays_back(saved, disruption.cost_micro_usd, disruption)
            or (slots := self.simulator.place(olds)) is None
        ):
            return []
        self.builder.nominated.update(slot.node_id for slot in slots)
        found: list[Drain | Launch] = []
        for old in olds:
            theirs, slots = slots[: len(old.shapes)], slots[len(old.shapes) :]
            where = ", ".join(dict.fromkeys(slot.node_id for slot in theirs))
            reason = f"{old.description} fit on {where}; saves {format_usd(old.price_micro_usd_h)}/h"
            if disruption.description:
                reason += f"; the move costs {format_usd(round(disruption.cost_micro_usd))} as {disruption.description}"
            found.append(drain_of(old, reason, old.price_micro_usd_h, self.now_s))
        return found

    def _buy(self, olds: Sequence[Tenants], disruption: DisruptionCost) -> list[Drain | Launch]:
        """Launches the cheapest nodes that hold the tenants, if the move pays back."""
        offerings, purchases = self.builder.state.offerings, list[_Purchase]()
        for old in olds:
            if (found := self._purchase(old, len(olds) - 1, disruption)) is not None:
                purchases.append(found)
                offerings.buy(found.offering)
        for purchase in purchases:
            offerings.cancel(purchase.offering)
        cost = sum(_overlap(p.old.price_micro_usd_h, p.offering.price_micro_usd_h) for p in purchases)
        cost += disruption.cost_micro_usd
        saved = sum(p.old.price_micro_usd_h - p.cost_micro_usd_h for p in purchases)
        if len(purchases) < len(olds) or not _pays_back(saved, cost, disruption):
            return []
        self._offers.clear()
        return [self._launch(purchase, cost, disruption) for purchase in purchases]

    def _purchase(self, old: Tenants, other_nodes: int, disruption: DisruptionCost) -> _Purchase | None:
        """Returns the best offering for one node's tenants, None if there is none. `other_nodes` is the number of
        further nodes that are bought, at about the same price.
        """
        table, rows = self.builder.state.offerings.table, self._offers_for(old)
        if not len(rows := rows[self.builder.state.offerings.purchasable()[rows] > 0]):
            return None
        at_risk = disruption.staying_micro_usd_h + other_nodes * table.price[rows]
        costs = table.cost[rows] + table.reclaims_per_h[rows] * disruption.lost_h * at_risk
        costs = costs + self._data_beyond(old)[rows]
        best = int(costs.argmin())
        if old.replicas:
            options = [(cost, cost, at) for at, cost in enumerate(costs.tolist())]
            best = spread_over(options, lambda at: table.offerings[rows[at]].zone, self._zones_of(old))[2]
        return _Purchase(old, table.offerings[rows[best]], float(costs[best]))

    def _offers_for(self, old: Tenants) -> Ints:
        """Returns the rows of available offerings that hold all tenants; no rows if no offering pays back the time in
        which both nodes are paid for.
        """
        if old.shape_key not in self._offers:
            offerings = self.builder.state.offerings
            able = (offerings.table.members(Shape.computed(old.resources, {})) > 0) & (offerings.purchasable() > 0)
            for labels in {tuple(shape.labels.items()) for shape in old.shapes}:
                able &= offerings.table.matching(dict(labels))
            has_pace = offerings.launches_left is None or offerings.launches_left > 0
            self._offers[old.shape_key] = np.flatnonzero(able & has_pace)
        table, found, price = self.builder.state.offerings.table, self._offers[old.shape_key], old.price_micro_usd_h
        costs = table.cost[found] + self._data_beyond(old)[found]
        pays = (price - costs) * PAYBACK_S > _overlap(price, table.price[found].astype(float)) * 3600.0
        return found if pays.any() else found[:0]

    def _data_beyond(self, old: Tenants) -> Floats:
        """Returns, for each offering, the additional cost per hour of getting the tenants' data there instead of to
        their present node.
        """
        table, node = self.builder.state.offerings.table, old.view.node
        data = table.data_cost(old.shapes)
        if not data.any():  # the usual case: it is the same everywhere, so the present offering does not matter
            return data
        here = [o.row for o in table.offerings if (o.node_type.name, o.zone) == (node.type, node.zone)]
        return data - data[here[0]] if here else data

    def _zones_of(self, old: Tenants) -> Counter[str]:
        """Returns the number of nodes in each zone that host the endpoints of this node's replicas; a node that moves
        counts at its destination.
        """
        occupancy, here = self.builder.occupancy, old.view.node.ray_node_id
        hosts = [
            occupancy.in_ray[node]
            for name, endpoint in {e.endpoint.name: e for e in old.replicas}.items()
            if name and endpoint.load
            for node in endpoint.load.replica_nodes
            if node in occupancy.in_ray and node != here
        ]
        return Counter(self.destination_zones.get(view.node.id, view.node.zone) for view in hosts)

    def _launch(self, purchase: _Purchase, cost_micro_usd: float, disruption: DisruptionCost) -> Launch:
        old, offering, state = purchase.old, purchase.offering, self.builder.state
        node, saved = old.view.node, old.price_micro_usd_h - offering.price_micro_usd_h
        shape = Shape.computed(old.resources, old.shapes[0].labels)
        alternatives = rejected(state.offerings, shape, 1, offering)
        slot = state.buy_offer(offering)
        state.reserve(slot.node_id, old.resources)
        self.builder.nominated.add(slot.node_id)
        self.destination_zones[node.id] = offering.zone
        price = f"{offering.node_type.market} at {format_usd(offering.price_micro_usd_h)}/h"
        reason = f"{offering.name} ({price}) holds {old.description} of "
        reason += f"{node.id} for {format_usd(saved)}/h less; the move costs {format_usd(round(cost_micro_usd))}"
        reason += f" as {disruption.description}" if disruption.description else ""
        stay = Rejected(f"stay on {node.id}", f"costs {format_usd(saved)}/h more", saved)
        subject = f"{MOVE}{node.id}"
        return Launch(
            slot.node_id, slot.node_type, slot.zone, subject, reason, offering.price_micro_usd_h, (stay, *alternatives)
        )


def may_leave(old: Tenants, now_s: float) -> bool:
    """Returns True if consolidation may move the tenants to other nodes. It may not if some usage of the node is
    unknown, or if the tenants include both replicas and members of gangs.
    """
    if any(endpoint.worth is not None for endpoint in old.replicas):
        return False  # slo_policy.py places them
    if any(endpoint.endpoint.spec.members > 1 for endpoint in old.replicas):
        return False  # Serve cannot move a single member of a replica
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
    """Returns the cost in micro-dollars of paying for both nodes during a move."""
    return (price_micro_usd_h + other_micro_usd_h) * OVERLAP_S / 3600.0


def _pays_back(saved_micro_usd_h: float, cost_micro_usd: float, disruption: DisruptionCost) -> bool:
    return saved_micro_usd_h * min(PAYBACK_S, disruption.stable_s) > cost_micro_usd * 3600.0


def _dearest_first(view: NodeView) -> tuple[int, str]:
    return -view.node.price_micro_usd_h, view.node.id
