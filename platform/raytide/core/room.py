"""What the fleet can still hold: the one answer that the queue (may it start?) and the planner (where?) share.

Pure and mutable only in the sense of a scratch pad: `place` takes what it promises out of the room, so that the same room
is never promised twice within one decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytide.core.fleet import Node, NodeState, NodeType, Resources, fits, labels_match, minus
from raytide.core.gang import GangSpec, Lease, Member, MemberState, Shape
from raytide.core.replicas import missing_replicas
from raytide.core.shortfall import Holding, Shortfall, explain, impossible
from raytide.core.snapshot import NodeView, Snapshot


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place. A new node has the id under which the plan buys it, so that two members can share it."""

    node_id: str
    node_type: str
    zone: str
    is_new: bool


Placements = tuple[Seat, ...]


class Room:
    """Free resources on nodes that are there or on their way, and nodes that could still be bought.

    `Room.of` has already taken out every promise: members with a node, and replicas that were published but have none yet.
    """

    replicas: dict[str, Placements | Shortfall]
    """For each endpoint with replicas that have no node: where they go, or why they cannot."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Room: ...

    def place(self, shape: Shape, count: int, *, at_least: int | None = None, subject: str) -> Placements | Shortfall:
        """Seats for as many members as can be had, `count` at most; nothing is taken when that is below `at_least`.

        `at_least` is `count` when left out: all or nothing.
        """
        ...


def check_possible(spec: GangSpec, node_types: Sequence[NodeType], *, subject: str = "the gang") -> None:
    """CapacityError when no state of the fleet, not even an empty one, could hold any shape of the gang."""
