"""How many members of each kind a room holds, counted once and then node by node where something changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.jobs.admission.shape_request import ShapeRequest
from raytide.scheduling.node_table import Need, members_in
from raytide.scheduling.state import SchedulingState


@dataclass(slots=True, eq=False)
class FitCount:
    """Of one kind of members."""

    need: Need
    """None where a node of no type has what they need."""
    labels: Mapping[str, str]
    on: dict[int, int]
    """By row of the grid: how many are free there."""
    there: int
    to_buy: int
    """How many nodes that can be had would hold."""
    is_able: dict[int, bool]
    """By row: whether the node carries the labels, where that was looked up."""
    bought: int
    """How many nodes were bought when that was counted."""
    seen: int
    """How many of the changes are counted."""

    @property
    def total(self) -> int:
        return self.there + self.to_buy


@dataclass(slots=True, eq=False)
class FitIndex:
    room: SchedulingState
    _changed: list[int] = field(default_factory=list)
    """Rows of the grid, in the order in which something was taken or given there."""
    _tallies: dict[int, FitCount] = field(default_factory=dict)
    _free: dict[int, list[float]] = field(default_factory=dict)
    """By row of the grid, where it was looked up since it changed."""

    def changed(self, node_id: str) -> None:
        if (at := self.room.rows.get(node_id)) is not None:
            self._changed.append(at)
            self._free.pop(at, None)

    def free_at(self, at: int) -> list[float]:
        """By column of the grid; not to be changed."""
        if (found := self._free.get(at)) is None:
            found = self._free[at] = self.room.node_table.free_at(at)
        return found

    def most(self, ask: ShapeRequest) -> int:
        """How many members there would be room for, nodes to be bought included: at most so many, that is."""
        return self.tally(ask).total

    def tally(self, ask: ShapeRequest) -> FitCount:
        if (tally := self._tallies.get(ask.member)) is None:
            tally = self._tallies[ask.member] = self._count(ask)
        if tally.seen < len(self._changed):
            for at in {*self._changed[tally.seen :]}:
                tally.there += (now := self.holding(tally, at, self.free_at(at))) - tally.on.get(at, 0)
                tally.on[at] = now
            tally.seen = len(self._changed)
        if tally.bought < len(self.room.bought):
            tally.to_buy, tally.bought = self.room.offerings.most(ask.shape), len(self.room.bought)
        return tally

    def holding(self, tally: FitCount, at: int, free: list[float]) -> int:
        """How many the node of this row would hold with so much free."""
        if (is_able := tally.is_able.get(at)) is None:
            is_able = tally.is_able[at] = bool(tally.need) and self.room.node_table.matches(at, tally.labels)
        return members_in(tally.need, free) if is_able else 0

    def _count(self, ask: ShapeRequest) -> FitCount:
        grid, shape = self.room.node_table, ask.shape
        rows, many = grid.rows_with_room(shape.resources, shape.labels)
        return FitCount(
            need=grid.columns(shape.resources),
            labels=shape.labels,
            on=dict(zip(rows.tolist(), many.tolist(), strict=True)),
            there=int(many.sum()),
            to_buy=self.room.offerings.most(shape),
            is_able={},
            bought=len(self.room.bought),
            seen=len(self._changed),
        )
