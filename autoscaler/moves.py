"""Replicas move to where they cost less: onto room that is free anyhow, or onto a cheaper node, back to spot above all.

A cheaper node is bought first (its subject is `move node-7`), and only once it is ready is the old one drained; Serve
starts a replica there before it stops the old one. So what was bought on demand in need stays until its replacement is
there. A move must pay back within `PAYBACK_S`; gangs and work without a lease are never moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from raytide.autoscaler.draft import Draft
from raytide.core.fleet import NodeState, NodeType, Resources, labels_match, plus, whole_shares
from raytide.core.gang import Shape
from raytide.core.market import Offer
from raytide.core.money import format_usd
from raytide.core.plan import Drain, Launch, Rejected
from raytide.core.replicas import is_fresh, replica_shape
from raytide.core.snapshot import EndpointView, NodeView, Snapshot

MOVE = "move "
PAYBACK_S = 3600.0
OVERLAP_S = 300.0
"""How long both nodes are paid for: the start of the new one, and the drain of the old one."""
DRAIN_S = 600.0
"""Requests that go on for longer on the old node are cut off."""
MOST_LEAVING = 0.1
"""Of all nodes, at once; one may always."""


@dataclass(frozen=True, slots=True)
class _Movable:
    """A node on which nothing but replicas run."""

    view: NodeView
    replicas: tuple[Shape, ...]

    @property
    def need(self) -> Resources:
        need: Resources = {}
        for shape in self.replicas:
            need = plus(need, whole_shares(shape.resources))
        return need

    @property
    def price_micro_usd_h(self) -> int:
        return self.view.node.price_micro_usd_h


def reserve(draft: Draft) -> None:
    """What was bought for a move is kept for those who will move there, unless they have become too many for it."""
    coming = _replacements(draft.snapshot)
    for old in _movable(draft.snapshot) if coming else ():
        new = coming.get(old.view.node.id)
        row = draft.room.rows.get(new.node.id) if new is not None else None
        if new is None or row is None or not draft.room.grid.has(row, old.need):
            continue
        if all(labels_match(shape.labels, new.labels) for shape in old.replicas):
            draft.promised.add(new.node.id)
            draft.movable.add(old.view.node.id)
            draft.room.take(new.node.id, old.need)


def decide(draft: Draft) -> list[Drain | Launch]:
    """At most so many moves as may leave at once."""
    snapshot = draft.snapshot
    leaving = sum(view.node.state is NodeState.DRAINING for view in snapshot.nodes)
    coming = _replacements(snapshot)
    budget = max(1, int(MOST_LEAVING * len(snapshot.nodes))) - leaving - len(coming)
    actions: list[Drain | Launch] = []
    going = set(coming)
    staying = Counter(v.node.type for v in snapshot.nodes if v.node.state in (NodeState.READY, NodeState.LAUNCHING))
    types = {t.name: t for t in snapshot.node_types}
    for old in sorted(_movable(snapshot), key=lambda old: (-old.price_micro_usd_h, old.view.node.id)):
        node = old.view.node
        if (new := coming.get(node.id)) is not None:
            is_free_to_go = node.id in draft.movable and node.id not in draft.promised
            if new.node.state is NodeState.READY and is_free_to_go:
                actions.append(_to_replacement(old, new, snapshot.at_s))
            continue
        is_needed = node.id in draft.promised or staying[node.type] <= _min_nodes(types.get(node.type))
        if budget <= 0 or is_needed or not _is_old_enough(old, snapshot):
            continue
        action = _to_free_room(draft, old, going) or _to_cheaper(draft, old)
        if action is not None:
            actions.append(action)
            going.add(node.id)
            staying[node.type] -= 1
            budget -= 1
    return actions


def _is_old_enough(old: _Movable, snapshot: Snapshot) -> bool:
    least_s, ready_at_s = snapshot.limits.moves_after_s, old.view.node.ready_at_s
    return least_s is not None and ready_at_s is not None and snapshot.at_s - ready_at_s >= least_s


def _to_replacement(old: _Movable, new: NodeView, now_s: float) -> Drain:
    saved = old.price_micro_usd_h - new.node.price_micro_usd_h
    reason = f"{new.node.id} ({new.node.type}) is ready for its {len(old.replicas)} replicas"
    reason += f"; saves {format_usd(saved)}/h"
    stay = Rejected(f"stay on {old.view.node.id}", f"costs {format_usd(saved)}/h more", saved)
    return Drain(old.view.node.id, "notice", now_s + DRAIN_S, reason, -old.price_micro_usd_h, (stay,))


def _to_free_room(draft: Draft, old: _Movable, going: set[str]) -> Drain | None:
    """All of its replicas fit on other nodes that are ready and stay."""
    node, room = old.view.node, draft.room
    allowed = _worth_using(draft, old) - going
    restore, seats = room.grid.undo(), []
    for shape in old.replicas:
        row = room.rows.get(node.id, -1)
        rows, _ = room.grid.fitting(shape.resources, shape.labels, enough=len(room.seats), but=row)
        ready = [row for row in rows.tolist() if room.seats[row].node_id in allowed]
        if not ready:
            restore()
            return None
        room.grid.take(ready[0], shape.resources)
        seats.append(room.seats[ready[0]].node_id)
    draft.promised.update(seats)
    saved = format_usd(old.price_micro_usd_h)
    reason = f"its {len(seats)} replicas fit on {', '.join(dict.fromkeys(seats))}; saves {saved}/h"
    stay = Rejected(f"stay on {node.id}", f"costs {saved}/h more", old.price_micro_usd_h)
    deadline_s = draft.snapshot.at_s + DRAIN_S
    return Drain(node.id, "notice", deadline_s, reason, -old.price_micro_usd_h, (stay,))


def _worth_using(draft: Draft, old: _Movable) -> set[str]:
    """Ready nodes that somebody uses, and cheaper ones: an idle node of the same price had better go itself."""
    room = draft.room
    return {
        view.node.id
        for view in draft.snapshot.nodes
        if view.node.state is NodeState.READY
        and (row := room.rows.get(view.node.id)) is not None
        and (view.node.price_micro_usd_h < old.price_micro_usd_h or not room.grid.has(row, view.countable))
    }


def _to_cheaper(draft: Draft, old: _Movable) -> Launch | None:
    """The cheapest node that would hold its replicas, if the move pays back."""
    market = draft.room.market
    need = old.need
    offers = [
        offer
        for offer, _ in market.holding(Shape(resources=dict(need)))
        if market.refusal(offer) is None and all(labels_match(shape.labels, offer.labels) for shape in old.replicas)
    ]
    best = min(offers, key=lambda offer: offer.cost_micro_usd_h, default=None)
    if best is None or not _pays_back(best, old.price_micro_usd_h):
        return None
    seat = draft.room.buy_offer(best)
    draft.room.take(seat.node_id, need)
    draft.promised.add(seat.node_id)
    node, saved = old.view.node, old.price_micro_usd_h - best.price_micro_usd_h
    overlap = round((best.price_micro_usd_h + old.price_micro_usd_h) * OVERLAP_S / 3600.0)
    reason = f"{best.name} ({best.node_type.market} at {format_usd(best.price_micro_usd_h)}/h) holds the replicas of "
    reason += f"{node.id} ({len(old.replicas)}) for {format_usd(saved)}/h less; the move costs {format_usd(overlap)}"
    stay = Rejected(f"stay on {node.id}", f"costs {format_usd(saved)}/h more", saved)
    return Launch(seat.node_id, seat.node_type, seat.zone, f"{MOVE}{node.id}", reason, best.price_micro_usd_h, (stay,))


def _pays_back(offer: Offer, price_micro_usd_h: int) -> bool:
    saved = (price_micro_usd_h - offer.cost_micro_usd_h) * PAYBACK_S
    return saved > (offer.price_micro_usd_h + price_micro_usd_h) * OVERLAP_S


def _replacements(snapshot: Snapshot) -> dict[str, NodeView]:
    """Nodes that were bought for a move and are there or coming, by the node that they replace."""
    there = (NodeState.REQUESTED, NodeState.LAUNCHING, NodeState.READY)
    old = {view.node.id for view in snapshot.nodes if view.node.state is NodeState.READY}
    found = [v for v in snapshot.nodes if v.node.subject.startswith(MOVE) and v.node.state in there]
    return {to: view for view in found if (to := view.node.subject.removeprefix(MOVE)) in old}


def _movable(snapshot: Snapshot) -> Iterator[_Movable]:
    """Ready nodes whose every used resource is a replica's, by fresh word of all their endpoints."""
    held: dict[str, list[EndpointView]] = {}
    for endpoint in snapshot.endpoints:
        for ray_node_id in endpoint.load.replica_nodes if endpoint.load else ():
            held.setdefault(ray_node_id, []).append(endpoint)
    seated = {member.node_id for lease in snapshot.leases for member in lease.members}
    for view in snapshot.nodes if held else ():
        here = held.get(view.node.ray_node_id, [])
        is_quiet = not view.is_draining and view.node.id not in seated
        if not here or not is_quiet or view.node.state is not NodeState.READY:
            continue
        if any(endpoint.worth is not None for endpoint in here):
            continue  # the serving policy decides where they are, see live_fleet
        if all(is_fresh(endpoint.load, snapshot.at_s) for endpoint in here):
            shapes = tuple(replica_shape(endpoint) for endpoint in here)
            if _is_all(view, shapes):
                yield _Movable(view, shapes)


def _is_all(view: NodeView, shapes: tuple[Shape, ...]) -> bool:
    used = {name: total - view.available.get(name, 0.0) for name, total in view.countable.items()}
    theirs: Resources = {}
    for shape in shapes:
        theirs = plus(theirs, shape.resources)
    return all(amount <= theirs.get(name, 0.0) + 1e-6 for name, amount in used.items())


def _min_nodes(node_type: NodeType | None) -> int:
    return node_type.min_nodes if node_type else 0
