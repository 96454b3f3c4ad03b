"""Counts the gang members that would fit on the nodes. A count is computed once, and then updated for changed nodes
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.queue.admission.shape_request import ShapeRequest
from raytide.scheduling.node_table import Need, members_in
from raytide.scheduling.state import SchedulingState


@dataclass(slots=True, eq=False)
class FitCount:
    """The number of members of one kind (equal resources and labels) that would fit."""

    need: Need
    """The resources of one member, by column of the node table; empty if no node has a resource that it needs."""
    labels: Mapping[str, str]
    ready_only: bool
    by_row: dict[int, int]
    """The number of members that fit, by row of the node table."""
    on_nodes: int
    to_buy: int
    """The number of members that fit on nodes that can be bought."""
    is_eligible: dict[int, bool]
    """True for rows whose node has the labels (and is ready); rows that were not looked up are missing."""
    bought: tuple[int, int]
    """`FitIndex.purchases` when `to_buy` was computed."""
    changes_seen: int

    @property
    def total(self) -> int:
        return self.on_nodes + self.to_buy


@dataclass(slots=True, eq=False)
class FitIndex:
    room: SchedulingState
    _changed: list[int] = field(default_factory=list)
    """Rows whose free resources changed, in order."""
    _counts: dict[tuple[int, bool], FitCount] = field(default_factory=dict)
    _free: dict[int, list[float]] = field(default_factory=dict)

    @property
    def purchases(self) -> tuple[int, int]:
        """A value that changes with every purchase, and with every purchase that is undone."""
        return len(self.room.bought), self.room.next_node

    def mark_changed(self, node_id: str) -> None:
        if (row := self.room.rows.get(node_id)) is not None:
            self._changed.append(row)
            self._free.pop(row, None)

    def free_at(self, row: int) -> list[float]:
        """Returns the free resources of a row of the node table, by column. Callers must not change the list."""
        if (found := self._free.get(row)) is None:
            found = self._free[row] = self.room.node_table.free_at(row)
        return found

    def count(self, request: ShapeRequest, *, ready_only: bool = False) -> FitCount:
        """Returns an upper bound of the number of members that fit.

        With `ready_only`, members are counted on ready nodes only. Otherwise they are counted on all nodes, including
        nodes that can be bought.
        """
        key = (request.member_key, ready_only)
        if (count := self._counts.get(key)) is None:
            count = self._counts[key] = self._count(request, ready_only)
        if count.changes_seen < len(self._changed):
            for row in {*self._changed[count.changes_seen :]}:
                count.on_nodes += (now := self.members_at(count, row, self.free_at(row))) - count.by_row.get(row, 0)
                count.by_row[row] = now
            count.changes_seen = len(self._changed)
        if not ready_only and count.bought != self.purchases:
            count.to_buy, count.bought = self.room.offerings.members_to_buy(request.shape), self.purchases
        return count

    def members_at(self, count: FitCount, row: int, free: list[float]) -> int:
        """Returns the number of members that would fit on the node of row `row` if its free resources were `free`."""
        if (is_eligible := count.is_eligible.get(row)) is None:
            nodes = self.room.node_table
            is_eligible = bool(count.need) and nodes.matches(row, count.labels)
            is_eligible = is_eligible and not (count.ready_only and not nodes.is_ready(row))
            count.is_eligible[row] = is_eligible
        return members_in(count.need, free) if is_eligible else 0

    def _count(self, request: ShapeRequest, ready_only: bool) -> FitCount:
        nodes, shape = self.room.node_table, request.shape
        rows, counts = nodes.rows_with_room(shape.resources, shape.labels)
        by_row = dict(zip(rows.tolist(), counts.tolist(), strict=True))
        if ready_only:
            by_row = {row: count for row, count in by_row.items() if nodes.is_ready(row)}
        return FitCount(
            need=nodes.columns(shape.resources),
            labels=shape.labels,
            ready_only=ready_only,
            by_row=by_row,
            on_nodes=sum(by_row.values()),
            to_buy=0 if ready_only else self.room.offerings.members_to_buy(shape),
            is_eligible={},
            bought=self.purchases,
            changes_seen=len(self._changed),
        )
