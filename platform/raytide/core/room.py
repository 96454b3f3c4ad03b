"""What the fleet can still hold: the one answer that the queue (may it start?) and the planner (where?) share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raytide.core.clock import utc
from raytide.core.errors import CapacityError
from raytide.core.fleet import Node, NodeState, NodeType, Resources, fits, labels_match, minus
from raytide.core.gang import GangSpec, Lease, Member, MemberState, Shape
from raytide.core.replicas import missing_replicas, replica_shape
from raytide.core.shortfall import Shortfall, amounts, copies, impossible, open_zones
from raytide.core.snapshot import NodeView, Pool, Snapshot

_RANK = {NodeState.READY: 0, NodeState.LAUNCHING: 1, NodeState.REQUESTED: 2}
"""Where members may sit, the soonest usable first."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place. A new node has the id under which the plan buys it, so that members can share it."""

    node_id: str
    node_type: str
    zone: str
    is_new: bool


Placements = tuple[Seat, ...]


@dataclass(slots=True)
class _Place:
    """One node, there or bought in this decision, with what nobody was promised."""

    seat: Seat
    rank: int
    labels: Mapping[str, str]
    free: dict[str, float]


@dataclass(slots=True)
class Room:
    """Free resources on nodes that are there or on their way, and nodes that could still be bought.

    `Room.of` has already taken out every promise: members with a node, and published replicas that have none yet.
    A scratch pad: `place` takes out what it promises, so that no room is promised twice within one decision.
    """

    at_s: float
    node_types: tuple[NodeType, ...]
    pools: Mapping[tuple[str, str], Pool]
    next_node: int
    places: list[_Place]
    left: dict[str, int]
    """Nodes of each type that its maximum still allows; one counts until the provider has ended it."""
    holders: Mapping[str, tuple[str, ...]]
    """Who holds something on nodes of each type, for the words of a shortfall."""
    replicas: dict[str, Placements] = field(default_factory=dict)
    """Where the published replicas of each endpoint that have no node will find one, as far as there is room."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Room:
        able = [view for view in snapshot.nodes if _takes_work(view.node) and _is_known(view, snapshot)]
        types = snapshot.node_types
        room = cls(
            at_s=snapshot.at_s,
            node_types=types,
            pools={(pool.node_type, pool.zone): pool for pool in snapshot.pools},
            next_node=snapshot.next_node,
            places=[_place(view, snapshot.leases) for view in able],
            left={t.name: t.max_nodes - sum(v.node.type == t.name for v in snapshot.nodes) for t in types},
            holders=_holders(snapshot),
        )
        for view in snapshot.endpoints:
            if missing := missing_replicas(view, snapshot):
                seats = room.place(replica_shape(view), missing, at_least=0, subject=view.endpoint.name)
                room.replicas[view.endpoint.name] = () if isinstance(seats, Shortfall) else seats
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
    ) -> Placements | Shortfall:
        """Seats for `count` members, or for as many as there is room for; nothing is taken below `at_least`.

        All or nothing when `at_least` is left out. First nodes that are there, the tightest fit first, then new nodes
        of the type that is cheapest for each member it would hold: of `menu` (all types), `max_new` at most (no limit).
        """
        chosen: list[_Place] = []
        for place in self._tightest(shape):
            chosen += [place] * min(copies(shape.resources, place.free), count - len(chosen))
        menu = tuple(self.node_types if menu is None else menu)
        bought: list[_Place] = []
        while len(chosen) < count and (max_new is None or len(bought) < max_new):
            place_or_none = self._cheapest(shape, count - len(chosen), menu, bought)
            if place_or_none is None:
                break
            bought.append(place_or_none)
            chosen += [place_or_none] * min(copies(shape.resources, place_or_none.free), count - len(chosen))
        if len(chosen) < (count if at_least is None else at_least):
            return self.why_not(shape, count if at_least is None else at_least, subject)
        for place in bought:
            self._add(place)
        for place in chosen:
            place.free = minus(place.free, shape.resources)
        return tuple(place.seat for place in chosen)

    def buy(self, node_type: NodeType) -> Seat | None:
        """One more node of a type, whoever needs it; None at its maximum or while all its pools back off."""
        place = self._new(node_type, node_type.zones, number=self.next_node)
        if place is None or self.left[node_type.name] <= 0:
            return None
        self._add(place)
        return place.seat

    def why_not(self, shape: Shape, count: int, subject: str) -> Shortfall:
        """What keeps `count` members from being placed now; capacity when nothing worse does."""
        if (never := impossible(shape, count, self.node_types, subject)) is not None:
            return never
        matching = [t for t in self.node_types if copies(shape.resources, t.resources) and open_zones(shape, t)]
        there = sum(copies(shape.resources, place.free) for place in self._tightest(shape))
        buyable = {t.name: max(0, self.left[t.name]) * copies(shape.resources, t.resources) for t in matching}
        waiting = [t for t in matching if buyable[t.name] and not self._open(t, open_zones(shape, t))]
        now = there + sum(buyable[t.name] for t in matching if t not in waiting)
        needs = f"needs {count} x ({amounts(shape)}), {min(now, count)} fit now"
        if waiting and now + sum(buyable[t.name] for t in waiting) >= count:
            return self._out_of_stock(shape, waiting, f"{subject} waits for nodes: {needs}")
        held = sorted({who for t in matching for who in self.holders.get(t.name, ())})
        by = f"; {', '.join(t.name for t in matching)} is held by {', '.join(held[:5])}" if held else ""
        more = f" and {len(held) - 5} more" if len(held) > 5 else ""
        return Shortfall(
            "capacity",
            f"{subject} waits for room: {needs}{by}{more}.",
            f"It starts when they end. To start now, raise max_nodes of {' or '.join(t.name for t in matching)}.",
        )

    def _tightest(self, shape: Shape) -> list[_Place]:
        """Nodes with room for a member: ready before launching, then those with the least left over."""
        able = [p for p in self.places if fits(shape.resources, p.free) and labels_match(shape.labels, p.labels)]
        names = {name for t in self.node_types for name in t.resources}
        scale = {name: max(t.resources.get(name, 0.0) for t in self.node_types) for name in names}
        return sorted(able, key=lambda p: (p.rank, _left_over(p.free, shape.resources, scale), _order(p.seat.node_id)))

    def _cheapest(self, shape: Shape, count: int, menu: Sequence[NodeType], bought: Sequence[_Place]) -> _Place | None:
        options = []
        for node_type in menu:
            useful = min(copies(shape.resources, node_type.resources), count)
            left = self.left[node_type.name] - sum(place.seat.node_type == node_type.name for place in bought)
            if useful and left > 0 and self._open(node_type, open_zones(shape, node_type)):
                price = node_type.price_micro_usd_h
                options.append((price / useful, price, node_type.name, node_type))
        if not options:
            return None
        best = min(options, key=lambda option: option[:3])[3]
        return self._new(best, open_zones(shape, best), number=self.next_node + len(bought))

    def _new(self, node_type: NodeType, zones: Sequence[str], *, number: int) -> _Place | None:
        if not (open_ := self._open(node_type, zones)):
            return None
        seat = Seat(f"node-{number}", node_type.name, open_[0], is_new=True)
        return _Place(seat, len(_RANK), node_type.all_labels(open_[0]), dict(node_type.resources))

    def _add(self, place: _Place) -> None:
        self.places.append(place)
        self.left[place.seat.node_type] -= 1
        self.next_node += 1

    def _open(self, node_type: NodeType, zones: Sequence[str]) -> tuple[str, ...]:
        """The zones whose pool does not back off, in the order of the node type."""
        return tuple(z for z in zones if self._retry_at_s(node_type, z) <= self.at_s)

    def _retry_at_s(self, node_type: NodeType, zone: str) -> float:
        pool = self.pools.get((node_type.name, zone))
        return pool.retry_at_s if pool else 0.0

    def _out_of_stock(self, shape: Shape, waiting: Sequence[NodeType], what: str) -> Shortfall:
        pools = [(t, zone) for t in waiting for zone in open_zones(shape, t)]
        retry_at_s = min(self._retry_at_s(t, zone) for t, zone in pools)
        names = ", ".join(f"{t.name} in {zone}" for t, zone in pools)
        return Shortfall(
            "stock",
            f"{what}; the provider had no {names}; asked again at {utc(retry_at_s)}.",
            "Allow another shape, add a zone or a node type, or wait.",
        )


def check_possible(spec: GangSpec, node_types: Sequence[NodeType], *, subject: str = "the gang") -> None:
    """CapacityError when no state of the fleet, not even an empty one, could hold any shape of the gang."""
    never = [impossible(shape, shape.at_least, node_types, subject) for shape in spec.shapes]
    if never[0] is not None and all(never):
        raise CapacityError(never[0].reason, hint=never[0].remedy)


def _takes_work(node: Node) -> bool:
    return node.state in _RANK and node.drain_deadline_s is None


def _is_known(view: NodeView, snapshot: Snapshot) -> bool:
    """Without Ray's word on what is free, a node that runs holds nothing new."""
    return snapshot.ray_answers or view.node.state is not NodeState.READY


def _place(view: NodeView, leases: Sequence[Lease]) -> _Place:
    node = view.node
    here = [(member, lease.shape) for lease in leases for member in lease.members if member.node_id == node.id]
    seat = Seat(node.id, node.type, node.zone, is_new=False)
    return _Place(seat, _RANK[node.state], view.labels, _unpromised(view.available, here))


def _unpromised(available: Resources, here: Sequence[tuple[Member, Shape]]) -> dict[str, float]:
    """Ray's free resources without those of members whose placement group Ray does not count yet.

    ASSIGNED has no group: taken out. FORMING has one that Ray may count or not. While the free resources still cover it
    it is taken out: at worst this hides its room for the second until it is READY, and never promises it twice. When
    they do not cover it, Ray must have counted it.
    """
    free = dict(available)
    for member, shape in here:
        if member.state is MemberState.ASSIGNED:
            free = minus(free, shape.resources)
    for member, shape in here:
        if member.state is MemberState.FORMING and fits(shape.resources, free):
            free = minus(free, shape.resources)
    return {name: max(0.0, amount) for name, amount in free.items()}


def _holders(snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    type_of = {view.node.id: view.node.type for view in snapshot.nodes}
    type_of_ray = {view.node.ray_node_id: view.node.type for view in snapshot.nodes if view.node.ray_node_id}
    members = [(lease, member) for lease in snapshot.leases for member in lease.members if member.node_id in type_of]
    held = [(type_of[member.node_id], lease.job_id) for lease, member in members]
    for view in snapshot.endpoints:
        nodes = view.load.replica_nodes if view.load else ()
        held += [(type_of_ray[node], view.endpoint.name) for node in nodes if node in type_of_ray]
    return {name: tuple(sorted({who for type_, who in held if type_ == name})) for name, _ in held}


def _left_over(free: Resources, need: Resources, scale: Mapping[str, float]) -> float:
    """What stays unused, in units of the largest node: keeps big and accelerated nodes for those who need them."""
    rest = minus(free, need)
    return round(sum(amount / scale[name] for name, amount in rest.items() if scale.get(name)), 9)


def _order(node_id: str) -> tuple[int, str]:
    """node-2 before node-10."""
    return len(node_id), node_id
