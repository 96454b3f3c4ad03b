"""The plan under construction. The nodes to buy are provisional: `finish` may replace them by fewer or cheaper ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytide.autoscaler.nodes.occupancy import NodeOccupancy
from raytide.autoscaler.provisioning.alternatives import data_words, rejected
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
    """The assignment of slots (places on nodes) to one subject, such as a lease. Its texts explain the actions that
    result from the assignment.
    """

    subject: str
    reason: str
    slots: Placements
    lease: Lease | None = None
    members: tuple[Member, ...] = ()
    """Members assigned to the first slots, in order; further slots are only reserved for the lease."""
    starting: str = ""
    """Text for a `starting` wait, "" for none."""


@dataclass(slots=True)
class PlanBuilder:
    snapshot: Snapshot
    state: SchedulingState
    occupancy: NodeOccupancy
    actions: list[Action]
    assignments: list[tuple[int, Assignment]] = field(default_factory=list)
    """The assignments, each with its insertion index in `actions`."""
    alternatives: dict[tuple[str, str, int], tuple[Rejected, ...]] = field(default_factory=dict)
    """Rejected offerings by shape, offering and members: many nodes of a plan share them."""
    nominated: set[str] = field(default_factory=set)
    """Ids of the nodes that this plan needs, which are not drained as idle: nodes that it buys, and nodes on which it
    assigns or reserves something.
    """
    replacements: dict[str, NodeView] = field(default_factory=dict)
    """Nodes bought for a move, by the id of the node that they replace."""
    movable: set[str] = field(default_factory=set)
    """Ids of nodes whose tenants all have a reservation on the replacement."""

    @property
    def leaving(self) -> set[str]:
        """Ids of the nodes that this plan drains so far."""
        return {action.node_id for action in self.actions if isinstance(action, Drain)}

    def assign(self, assignment: Assignment) -> None:
        if assignment.slots:
            self.assignments.append((len(self.actions), assignment))

    def wait(self, subject: str, unschedulable: Unschedulable) -> None:
        self.actions.append(Wait(subject, unschedulable.constraint, unschedulable.reason, unschedulable.remedy))

    def finish(self) -> None:
        """Moves assignments onto fewer or cheaper new nodes where possible, and turns the assignments into actions."""
        repacking = repack(self.state)
        done, at = [], 0
        for before, assignment in self.assignments:
            done += [*self.actions[at:before], *self._actions_of(assignment, repacking)]
            at = before
        self.actions = [*done, *self.actions[at:]]
        self.assignments = []

    def buy(self, slot: Slot, subject: str, reason: str) -> None:
        """Adds the launch of this slot's node to the plan. The node stays in the plan although nothing is placed on
        it.
        """
        self.actions.append(self._launch(slot, subject, reason))
        self.nominated.add(slot.node_id)

    def _actions_of(self, assignment: Assignment, repacking: Repacking) -> list[Action]:
        slots = [repacking.final_slot(slot) for slot in assignment.slots]
        actions: list[Action] = []
        for slot in slots:
            if slot.is_new and slot.node_id not in self.nominated:
                actions.append(self._launch(slot, assignment.subject, assignment.reason))
            self.nominated.add(slot.node_id)
        for member, slot in zip(assignment.members, slots, strict=False):
            assert assignment.lease is not None
            there = "bought for it" if slot.is_new else "has room"
            reason = f"{slot.node_id} ({slot.node_type}) {there}"
            actions.append(Assign(assignment.lease.id, member.index, slot.node_id, reason))
        if assignment.starting:
            nodes = ", ".join(dict.fromkeys(slot.node_id for slot in slots))
            actions.append(Wait(assignment.subject, "starting", f"{assignment.starting} on {nodes}"))
        return actions

    def _launch(self, slot: Slot, subject: str, reason: str) -> Launch:
        offering = self.state.bought[slot.node_id]
        price = f"{offering.node_type.market} at {format_usd(offering.price_micro_usd_h)}/h"
        endpoint = self.occupancy.endpoints.get(subject)
        alternatives = self._alternatives(slot, offering, endpoint)
        is_planned = endpoint is not None and endpoint.pools is not None
        how = "costs it least, correlated losses included" if is_planned else "is the cheapest available"
        best = f"{offering.name} ({price})" + (f" {how}" if self.state.tenants[slot.node_id] else "")
        shapes = {id(tenant.shape): tenant.shape for tenant in self.state.tenants[slot.node_id]}.values()
        data = [words for shape in shapes if (words := data_words(self.state.offerings, offering, shape))]
        best += f", with {data[0]}" if data else ""
        return Launch(
            slot.node_id,
            slot.node_type,
            slot.zone,
            subject,
            f"{reason}; {best}",
            offering.price_micro_usd_h,
            alternatives,
        )

    def _alternatives(self, slot: Slot, offering: Offering, endpoint: EndpointView | None) -> tuple[Rejected, ...]:
        """Returns the rejected offerings for the node's first tenant; if it is a replica, the offerings
        of every zone.
        """
        shapes = [tenant.shape for tenant in self.state.tenants[slot.node_id]]
        if not shapes:
            return ()
        members = sum(shape is shapes[0] for shape in shapes)
        shape = shapes[0] if endpoint is None else replica_shape(endpoint)
        key = (shape.describe(), offering.name, members)
        if key not in self.alternatives:
            self.alternatives[key] = rejected(
                self.state.offerings, shape, members, offering, is_spread=endpoint is not None
            )
        return self.alternatives[key]
