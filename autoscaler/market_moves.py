"""Gangs with a deadline go over to the market in which they should sit: from on demand to spot that is cheaper, and
from spot to on demand when their time runs out.

New nodes are bought first, and the gang works on where it is until all of them are ready. It is asked of nobody whether
that pays: the deadline policy has weighed it. A node that others use too is not left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from raytide.autoscaler.draft import Draft
from raytide.autoscaler.roster import Occupants
from raytide.autoscaler.stops import NOTICE_S, stop_of
from raytide.core.choice import Seat
from raytide.core.fleet import NodeState
from raytide.core.gang import Lease, Shape
from raytide.core.plan import Drain
from raytide.core.room import Room
from raytide.core.shortfall import Shortfall
from raytide.core.snapshot import NodeView, Snapshot
from raytide.core.stance import Stance, bound, may_sit


def stance_of(snapshot: Snapshot, old: Occupants) -> Stance | None:
    """Of the one gang on this node; None when it has no deadline to keep."""
    stances = (snapshot.stances.get(lease.job_id) for lease, _ in old.seats)
    return next((stance for stance in stances if stance is not None and stance.markets is not None), None)


def is_wanted(stance: Stance, new: NodeView) -> bool:
    """Whether a node that was bought for a gang is still of the market where that should sit."""
    return stance.wanted is new.node.market


def drain(old: Occupants, new_ids: Sequence[str], stance: Stance, now_s: float) -> Drain:
    reason = f"{', '.join(new_ids)} is ready for {old.whom}: {stance.reason}"
    return Drain(old.view.node.id, "notice", now_s + NOTICE_S, reason, -old.price_micro_usd_h)


def decide(draft: Draft, move: str, going: Collection[str]) -> Iterator[Drain]:
    """Buys what is missing, and leaves nodes whose gang has room that is there. `going` are replaced already."""
    for lease in draft.snapshot.leases:
        stance = draft.snapshot.stances.get(lease.job_id)
        if stance is None or not (olds := _misplaced(draft, lease, stance)):
            continue
        if any(old.view.node.id in going for old in olds) or stop_of(draft.roster, olds, draft.snapshot.at_s) is None:
            continue
        if _seats(draft.room.copy(), olds, stance) is None:
            continue
        seats = _seats(draft.room, olds, stance)
        assert seats is not None
        draft.promised.update(seat.node_id for seat in seats)
        for old, seat in zip(olds, seats, strict=True):
            if seat.is_new:
                why = f"for {lease.job_id} in place of {old.view.node.id}: {stance.reason}"
                draft.buy(seat, f"{move}{old.view.node.id}", why)
        if all(_is_ready(draft, seat) for seat in seats):
            yield from (drain(o, [s.node_id], stance, draft.snapshot.at_s) for o, s in zip(olds, seats, strict=True))


def _misplaced(draft: Draft, lease: Lease, stance: Stance) -> list[Occupants]:
    """Its nodes of other markets than the wanted one, if it may sit there and can be taken from all of them."""
    if not may_sit(lease.shape, stance):
        return []
    views = (draft.roster.views.get(node_id) for node_id in {m.node_id for m in lease.members if m.holds})
    wrong = [view for view in views if view is not None and not is_wanted(stance, view)]
    olds = [draft.roster.on(view) for view in sorted(wrong, key=lambda view: view.node.id)]
    is_alone = all(old.leases == {lease.id} and not old.replicas and old.are_all for old in olds)
    return olds if is_alone and all(old.view.node.state is NodeState.READY for old in olds) else []


def _seats(room: Room, olds: Sequence[Occupants], stance: Stance) -> list[Seat] | None:
    """For all who are on each of these nodes, one node of the wanted market; None when one has none."""
    found: list[Seat] = []
    for old in olds:
        (shape,) = bound([Shape(resources=dict(old.need), labels=old.asks[0].labels)], stance)[:1]
        seats = room.place(shape, 1, subject="")
        if isinstance(seats, Shortfall):
            return None
        found += seats
    return found


def _is_ready(draft: Draft, seat: Seat) -> bool:
    view = draft.roster.views.get(seat.node_id)
    return view is not None and view.node.state is NodeState.READY
