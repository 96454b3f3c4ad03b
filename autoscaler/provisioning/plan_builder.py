"""A plan while it is made: who sits where, and what is said. Nothing is final until regret has been repaired."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytide.autoscaler.nodes.occupancy import NodeOccupancy
from raytide.autoscaler.provisioning.alternatives import rejected
from raytide.core.money import format_usd
from raytide.core.objects.gang import Lease, Member
from raytide.core.objects.plan import Action, Assign, Drain, Launch, Rejected, Wait
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.scheduling.diagnosis import Unschedulable
from raytide.scheduling.offerings import Offering
from raytide.scheduling.placement import Slot
from raytide.scheduling.repacking import Repacking, repack
from raytide.scheduling.replicas import replica_shape
from raytide.scheduling.state import Placements, SchedulingState


@dataclass(frozen=True, slots=True)
class Assignment:
    """Seats of one subject, and what will be said of them."""

    subject: str
    reason: str
    slots: Placements
    lease: Lease | None = None
    members: tuple[Member, ...] = ()
    """Who of the lease is assigned to these seats, in their order; the other seats are only kept for it."""
    starting: str = ""
    """What starts on them, when somebody is to be told that it waits for that."""


@dataclass(slots=True)
class PlanBuilder:
    snapshot: Snapshot
    state: SchedulingState
    occupancy: NodeOccupancy
    actions: list[Action]
    assignments: list[tuple[int, Assignment]] = field(default_factory=list)
    """With the place in `actions` in front of which each belongs."""
    alternatives: dict[tuple[str, str, int], tuple[Rejected, ...]] = field(default_factory=dict)
    """What else could have been bought, by shape, offer and members: nodes are often bought by the dozen."""
    nominated: set[str] = field(default_factory=set)
    """Nodes that this plan counts on: bought by it, or seating somebody whom Ray does not show there yet."""
    replacements: dict[str, NodeView] = field(default_factory=dict)
    """Nodes that were bought for a move, by the node that they replace."""
    movable: set[str] = field(default_factory=set)
    """Nodes whose occupants all have their room on the node that was bought to replace theirs."""

    @property
    def leaving(self) -> set[str]:
        """Nodes that this plan drains, as far as it is made."""
        return {action.node_id for action in self.actions if isinstance(action, Drain)}

    def assign(self, seating: Assignment) -> None:
        if seating.slots:
            self.assignments.append((len(self.actions), seating))

    def wait(self, subject: str, short: Unschedulable) -> None:
        self.actions.append(Wait(subject, short.constraint, short.reason, short.remedy))

    def finish(self) -> None:
        """Repair what is to be bought, and turn the seatings into actions."""
        repaired = repack(self.state)
        done, at = [], 0
        for before, seating in self.assignments:
            done += [*self.actions[at:before], *self._actions_of(seating, repaired)]
            at = before
        self.actions = [*done, *self.actions[at:]]
        self.assignments = []

    def buy(self, seat: Slot, subject: str, why: str) -> None:
        """A node for nobody in particular."""
        self.actions.append(self._launch(seat, subject, why))
        self.nominated.add(seat.node_id)

    def _actions_of(self, seating: Assignment, repaired: Repacking) -> list[Action]:
        seats = [repaired.final_slot(seat) for seat in seating.slots]
        actions: list[Action] = []
        for seat in seats:
            if seat.is_new and seat.node_id not in self.nominated:
                actions.append(self._launch(seat, seating.subject, seating.reason))
            self.nominated.add(seat.node_id)
        for member, seat in zip(seating.members, seats, strict=False):
            assert seating.lease is not None
            there = "bought for it" if seat.is_new else "has room"
            reason = f"{seat.node_id} ({seat.node_type}) {there}"
            actions.append(Assign(seating.lease.id, member.index, seat.node_id, reason))
        if seating.starting:
            nodes = ", ".join(dict.fromkeys(seat.node_id for seat in seats))
            actions.append(Wait(seating.subject, "starting", f"{seating.starting} on {nodes}"))
        return actions

    def _launch(self, seat: Slot, subject: str, why: str) -> Launch:
        offer = self.state.bought[seat.node_id]
        price = f"{offer.node_type.market} at {format_usd(offer.price_micro_usd_h)}/h"
        served = self.occupancy.endpoints.get(subject)
        others = self._alternatives(seat, offer, served)
        is_planned = served is not None and served.pools is not None
        how = "costs it least, what would be lost together included" if is_planned else "is the cheapest to be had"
        best = f"{offer.name} ({price})" + (f" {how}" if self.state.tenants[seat.node_id] else "")
        return Launch(
            seat.node_id, seat.node_type, seat.zone, subject, f"{why}; {best}", offer.price_micro_usd_h, others
        )

    def _alternatives(self, seat: Slot, offer: Offering, served: EndpointView | None) -> tuple[Rejected, ...]:
        """Judged by its first tenant's shape, for replicas wherever they might have been bought."""
        shapes = [tenant.shape for tenant in self.state.tenants[seat.node_id]]
        if not shapes:
            return ()
        members = sum(shape is shapes[0] for shape in shapes)
        shape = shapes[0] if served is None else replica_shape(served)
        key = (shape.describe(), offer.name, members)
        if key not in self.alternatives:
            self.alternatives[key] = rejected(self.state.offerings, shape, members, offer, is_spread=served is not None)
        return self.alternatives[key]
