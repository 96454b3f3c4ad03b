"""The resources that the fleet can still provide. The queue uses this state to start jobs, and the planner uses it to
place the jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field, replace

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import (
    TYPE_LABEL,
    ZONE_LABEL,
    Node,
    NodeState,
    NodeType,
    Resources,
)
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot, Throughputs
from raytide.scheduling.diagnosis import Holders, Unschedulable, why_impossible, why_not
from raytide.scheduling.lookahead import PendingDemand
from raytide.scheduling.node_table import NodeTable
from raytide.scheduling.offerings import Offering, Offerings
from raytide.scheduling.placement import (
    Candidate,
    PlacementRequest,
    Slot,
    Tenant,
    best_candidate,
    resource_scale,
    usual_shapes,
)
from raytide.scheduling.replicas import (
    departing_nodes,
    missing_replicas,
    released_nodes,
    replica_shape,
    replica_throughputs,
)
from raytide.scheduling.throughput import at_least_as_fast_as
from raytide.scheduling.unattributed import UnattributedUsage, free_resources

_RANK = {NodeState.READY: 0, NodeState.LAUNCHING: 1, NodeState.REQUESTED: 2}
"""The states of nodes on which members may be placed, those usable soonest first."""
_NEW = len(_RANK)

Placements = tuple[Slot, ...]

_PlacementKey = tuple[
    tuple[tuple[str, float], ...],
    tuple[tuple[str, str], ...],
    str,
    frozenset[str] | None,
    int | None,
    frozenset[str] | None,
]
"""A shape, the allowed types, the number of nodes that may be bought, and the nodes that may not be shared."""


@dataclass(slots=True)
class SchedulingState:
    """The free resources on existing and starting nodes, and the nodes that can be bought.

    Resources that are already promised to members and to replicas are reserved from the start. `place` reserves what it
    returns, so nothing is promised twice within a decision."""

    snapshot: Snapshot
    offerings: Offerings
    next_node: int
    node_table: NodeTable
    slots: list[Slot] = field(default_factory=list)
    """The slots by row of the node table."""
    rows: dict[str, int] = field(default_factory=dict)
    """The rows by node id."""
    bought: dict[str, Offering] = field(default_factory=dict)
    tenants: dict[str, list[Tenant]] = field(default_factory=dict)
    """The tenants of each new node, in the order of placement, by node id."""
    pending: PendingDemand | None = None
    """The demand that will be placed later in this decision; None if unknown."""
    missing: dict[str, int] = field(default_factory=dict)
    """The number of members of published replicas without a node, by endpoint."""
    replicas: dict[str, Placements] = field(default_factory=dict)
    """The slots reserved for these members, as far as they fit, by endpoint."""
    _holders: Holders | None = None
    full: set[_PlacementKey] = field(default_factory=set)
    """The placements for which there was no slot at all; valid until something is released or bought."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> SchedulingState:
        able = [view for view in snapshot.nodes if _takes_work(view.node) and _is_known(view, snapshot)]
        room = cls(
            snapshot=snapshot,
            offerings=Offerings.from_snapshot(snapshot),
            next_node=snapshot.next_node,
            node_table=NodeTable(
                resource_scale(snapshot.node_types, able),
                usual_shapes(snapshot.leases, snapshot.jobs, snapshot.endpoints),
            ),
        )
        able.sort(key=lambda view: _order(view.node.id))
        room.slots = [Slot(view.node.id, view.node.type, view.node.zone, is_new=False) for view in able]
        room.rows = {slot.node_id: row for row, slot in enumerate(room.slots)}
        room.node_table.extend(
            free_resources(able, snapshot.leases),
            [_RANK[view.node.state] for view in able],
            [view.labels for view in able],
        )
        leaving = departing_nodes(snapshot) | released_nodes(snapshot)
        zones = {view.node.ray_node_id: view.node.zone for view in snapshot.nodes}
        unattributed = UnattributedUsage(snapshot)
        for view in snapshot.endpoints:
            missing = missing_replicas(view, snapshot, leaving)
            starting = unattributed.starting_replicas(view, missing) if missing else 0
            if missing := missing - starting:
                vacated = unattributed.yielded_slots(view, starting)
                name, hosts = view.endpoint.name, view.load.replica_nodes if view.load else ()
                zone_counts = Counter(zones[node] for node in hosts if node in zones and node not in leaving)
                for node_id, resources in vacated:
                    room.release(node_id, resources)
                room.missing[name], room.replicas[name] = missing, room._slots_for(view, missing, zone_counts)
                for node_id, resources in vacated:
                    room.reserve(node_id, resources)
        return room

    def place(
        self,
        shape: Shape,
        count: int,
        *,
        subject: str,
        at_least: int | None = None,
        menu: Iterable[NodeType] | None = None,
        max_new: int | None = None,
        spread_from: Counter[str] | None = None,
        paces: Throughputs | None = None,
        apart: frozenset[str] | None = None,
    ) -> Placements | Unschedulable:
        """Reserves slots for `count` members, or for as many as fit, and returns the slots. Returns an Unschedulable if
        fewer than `at_least` members fit. The default of `at_least` is `count`.

        Existing nodes are used first, the tightest fit first. New nodes follow, from the pool that is cheapest per
        member. `menu` restricts the types of new nodes. `max_new` is the largest number of new nodes. If
        `spread_from` is given, members are spread over zones. `spread_from` then has the number of members that each
        zone already has. `paces` is the relative throughput by node type. It is used to compare costs per unit of
        work. If `apart` is given, each member gets a node of its own. The nodes in `apart` are not used."""
        if count <= 0:
            return ()
        needed = count if at_least is None else at_least
        types = None if menu is None else frozenset(t.name for t in menu)
        key = (tuple(shape.resources.items()), tuple(shape.labels.items()), shape.together, types, max_new, apart)
        if key in self.full:
            return () if needed <= 0 else self.why_not(shape, needed, subject)
        request = PlacementRequest(shape, count, types, max_new, spread_from, paces or {}, apart)
        best, most = self._search(request, needed, self.pending)
        if self.pending is not None and (best is None or best.count < count):  # nothing can be kept for later demand
            self._free_held()
            best, most = self._search(request, needed, None)
        if not most and self.offerings.launches_left is None:
            self.full.add(key)
        if best is None:
            return () if needed <= 0 else self.why_not(shape, needed, subject)
        return self._commit(best, types, is_spread=spread_from is not None, is_apart=apart is not None)

    def place_some(
        self,
        shape: Shape,
        count: int,
        *,
        menu: Iterable[NodeType] | None = None,
        max_new: int | None = None,
        spread_from: Counter[str] | None = None,
        paces: Throughputs | None = None,
    ) -> Placements:
        """Reserves slots for as many of `count` members as fit, and returns the slots."""
        slots = self.place(
            shape, count, subject="", at_least=0, menu=menu, max_new=max_new, spread_from=spread_from, paces=paces
        )
        assert not isinstance(slots, Unschedulable)
        return slots

    def buy(self, node_type: NodeType) -> Slot | None:
        """Buys one node of a type, for any use. Returns None if none can be bought."""
        offerings = [o for o in self.offerings.offerings if o.node_type.name == node_type.name]
        able = [o for o in offerings if self.offerings.refusal(o) is None]
        return self.buy_offer(min(able, key=lambda offering: offering.cost_micro_usd_h)) if able else None

    def buy_offer(self, offering: Offering) -> Slot:
        return self._buy(offering, 1)[0]

    def cancel_empty(self, node_ids: Iterable[str]) -> None:
        """Undoes the purchase of each given new node that has no reservation left."""
        for node_id in dict.fromkeys(node_ids):
            offering = self.bought.get(node_id)
            if offering is None or not self.node_table.has_free(self.rows[node_id], offering.node_type.resources):
                continue
            self.offerings.cancel(self.bought.pop(node_id))
            del self.tenants[node_id]
            self.node_table.set_free(self.rows.pop(node_id), {}, {})
            self.full.clear()

    def why_not(self, shape: Shape, count: int, subject: str) -> Unschedulable:
        """Returns the reason why `count` members cannot be placed now."""
        if not self.offerings.could_hold(shape, count):
            never = why_impossible(shape, count, self.snapshot.node_types, subject)
            assert never is not None
            return never
        existing = max(
            (int(self.node_table.rows_with_room(b.resources, b.labels)[1].sum()) for b in self._per_domain(shape)),
            default=0,
        )
        if self._holders is None:
            self._holders = Holders(self.snapshot)
        return why_not(self.offerings, self._holders, shape, count, existing, subject)

    def copy(self) -> SchedulingState:
        """Returns a copy that can be changed without affecting this one."""
        return replace(
            self,
            offerings=self.offerings.copy(),
            pending=copy(self.pending),
            node_table=self.node_table.copy(),
            slots=list(self.slots),
            rows=dict(self.rows),
            bought=dict(self.bought),
            tenants={node_id: list(tenants) for node_id, tenants in self.tenants.items()},
            missing=dict(self.missing),
            replicas=dict(self.replicas),
            full=set(self.full),
        )

    def advance(self) -> None:
        """Frees the resources held for the next shape of the pending demand. Call it before placing that shape."""
        if self.pending is not None and self.pending.advance(self.node_table):
            self.full.clear()

    def forget_pending(self) -> None:
        """Frees the resources that are held for pending demand, and makes later placements ignore that demand."""
        self._free_held()
        self.pending = None

    def _free_held(self) -> None:
        if self.pending is not None and self.pending.free_all(self.node_table):
            self.full.clear()

    def release(self, node_id: str, resources: Resources) -> None:
        """Frees resources on a node. Has no effect on a node that accepts no new work."""
        if (row := self.rows.get(node_id)) is not None:
            self.node_table.reserve(row, resources, -1)
            self.full.clear()

    def reserve(self, node_id: str, resources: Resources) -> None:
        if (row := self.rows.get(node_id)) is not None:
            self.node_table.reserve(row, resources)

    def _slots_for(self, view: EndpointView, missing: int, zone_counts: Counter[str]) -> Placements:
        """Reserves slots for replicas: in free resources, then on nodes that their policy chose to buy, or else on the
        cheapest."""
        shape, name = replica_shape(view), view.endpoint.name
        if (members := view.endpoint.spec.members) > 1:
            return self._place_whole(shape, missing, members, name)
        if view.pools is None:
            return self.place_some(shape, missing, spread_from=zone_counts, paces=replica_throughputs(view))
        slots = self.place_some(shape, missing, max_new=0)
        for (node_type, zone), count in Counter(view.pools[: missing - len(slots)]).items():
            labels = {**shape.labels, TYPE_LABEL: node_type, ZONE_LABEL: zone}
            slots += self.place_some(shape.model_copy(update={"labels": labels}), count)
        return slots

    def _place_whole(self, shape: Shape, missing: int, members: int, subject: str) -> Placements:
        """Reserves slots for replicas of several members, each whole or not at all; first the missing members of
        incomplete replicas."""
        slots: Placements = ()
        while missing > 0:
            count = missing % members or members
            if isinstance(found := self.place(shape, count, subject=subject), Unschedulable):
                break
            slots, missing = slots + found, missing - count
        return slots

    def _search(
        self, request: PlacementRequest, needed: int, pending: PendingDemand | None
    ) -> tuple[Candidate | None, int]:
        """Returns the best placement of at least `needed` members or None, and the most members that fit in a
        domain."""
        best: Candidate | None = None
        most = 0
        for bound in self._per_domain(request.shape):
            request = replace(request, shape=bound)
            candidate = best_candidate(self.offerings, self.node_table, self.slots, pending, request, needed)
            most = max(most, candidate.count)
            if candidate.count >= needed and (best is None or candidate.rating < best.rating):
                best = candidate
        return best, most

    def _per_domain(self, shape: Shape) -> list[Shape]:
        """Returns the shape once for each value of the label that its members share; the shape itself if they share
        none."""
        if not shape.together:
            return [shape]
        rows, _ = self.node_table.rows_with_room(shape.resources, shape.labels)
        values = self.node_table.values(shape.together, rows)
        values |= {
            o.labels[shape.together] for o, _ in self.offerings.offerings_for(shape) if shape.together in o.labels
        }
        return [shape.model_copy(update={"labels": {**shape.labels, shape.together: v}}) for v in sorted(values)]

    def _commit(
        self, candidate: Candidate, menu: frozenset[str] | None, *, is_spread: bool, is_apart: bool
    ) -> Placements:
        slots: list[Slot] = []

        def tenant(slot: Slot) -> Tenant:
            types = at_least_as_fast_as(slot.node_type, candidate.paces)
            return Tenant(candidate.shape, menu, slot.zone if is_spread else "", types, is_apart)

        if self.pending is not None and candidate.remaining is not None:
            self.pending.remaining = candidate.remaining
        self.node_table.reserve_each(
            [row for row, _ in candidate.existing], candidate.shape.resources, [n for _, n in candidate.existing]
        )
        for row, members in candidate.existing:
            slots += [self.slots[row]] * members
            if self.slots[row].is_new:
                self.tenants[self.slots[row].node_id] += [tenant(self.slots[row])] * members
        for new in candidate.new:
            fit, bought = new.members // new.nodes, self._buy(new.offering, new.nodes)
            rows = [self.rows[slot.node_id] for slot in bought]
            self.node_table.reserve_each(rows, candidate.shape.resources, [fit] * new.nodes)
            if self.pending is not None and new.shared is not None:
                self.pending.hold(self.node_table, rows, new.shared)
            for slot in bought:
                self.tenants[slot.node_id] = [tenant(slot)] * fit
                slots += [slot] * fit
        return tuple(slots)

    def _buy(self, offering: Offering, count: int) -> list[Slot]:
        """Buys nodes of one pool, in consecutive rows."""
        node_type, first = offering.node_type, len(self.slots)
        numbers = range(self.next_node, self.next_node + count)
        slots = [Slot(f"node-{number}", node_type.name, offering.zone, is_new=True) for number in numbers]
        self.next_node += count
        for at, slot in enumerate(slots):
            self.offerings.buy(offering)
            self.bought[slot.node_id], self.tenants[slot.node_id] = offering, []
            self.rows[slot.node_id] = first + at
        self.slots += slots
        self.node_table.extend([node_type.resources] * count, [_NEW] * count, [offering.labels] * count)
        self.full.clear()
        return slots


def _takes_work(node: Node) -> bool:
    return node.state in _RANK and node.drain_deadline_s is None


def _is_known(view: NodeView, snapshot: Snapshot) -> bool:
    """Returns False for ready nodes while Ray does not answer, because nothing new is placed there then."""
    return snapshot.ray_answers or view.node.state is not NodeState.READY


def _order(node_id: str) -> tuple[int, str]:
    """Returns a sort key that puts node-2 before node-10."""
    return len(node_id), node_id
