"""Where those who leave a node fit on others: ready ones that are in use, or cheaper.

An idle node of the same price had better go itself. What many nodes ask for is looked up once: of thousands of nodes
nearly all hold those who fit nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from raytide.autoscaler.nodes.occupancy import Tenants
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import NodeState
from raytide.scheduling.node_table import Mask, Rows
from raytide.scheduling.placement import Slot
from raytide.scheduling.state import SchedulingState

MAX_TRIES = 64
"""Of placing the occupants of nodes one by one, in one decision."""

_Key = tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str], ...]]


class ReschedulingSimulator:
    def __init__(self, room: SchedulingState) -> None:
        self._room, self._tries = room, MAX_TRIES
        views = {view.node.id: view for view in room.snapshot.nodes}
        there = [views[seat.node_id] for seat in room.slots if seat.node_id in views]  # bought ones come last
        self._is_ready = np.array([view.node.state is NodeState.READY for view in there], dtype=np.bool_)
        self._is_used = ~room.node_table.have_free([view.countable for view in there])
        self._price = np.array([view.node.price_micro_usd_h for view in there], dtype=np.int64)
        self._members: dict[_Key, Rows] = {}
        self._sums: dict[tuple[_Key, int], int] = {}

    def exclude(self, node_ids: Iterable[str]) -> None:
        """Nobody moves there any more."""
        self._is_ready[self._rows(node_ids)] = False
        self._sums.clear()

    def place(self, olds: Sequence[Tenants]) -> list[Slot] | None:
        """Seats for all who are on these nodes, taken; None when they do not all fit."""
        own = self._rows(old.view.node.id for old in olds)
        if not self._tries or not all(map(self.could_fit, olds)):
            return None
        self._tries -= 1
        restore, found = self._room.node_table.checkpoint(), list[Slot]()
        for old in olds:
            able = self._able(old.price_micro_usd_h)
            able[own] = False
            for shape in old.shapes:
                rows, _ = self._room.node_table.fitting(shape.resources, shape.labels, enough=len(self._room.slots))
                rows = rows[rows < len(able)]
                rows = rows[able[rows]]
                if not rows.size:
                    restore()
                    return None
                self._room.node_table.reserve(int(rows[0]), shape.resources)
                found.append(self._room.slots[int(rows[0])])
        self._members.clear()
        self._sums.clear()
        return found

    def could_fit(self, old: Tenants) -> bool:
        """Whether each shape would if it were alone: quick, and wrong only when it says yes."""
        own, price, asked = self._rows([old.view.node.id]), old.price_micro_usd_h, {_key(s): s for s in old.shapes}
        for key, count in Counter(map(_key, old.shapes)).items():
            if key not in self._members:
                self._members[key] = self._members_of(asked[key])
            members = self._members[key]
            if (key, price) not in self._sums:
                self._sums[key, price] = int(members[self._able(price)].sum())
            own_members = sum(int(members[row]) for row in own if self._able(price, row))
            if self._sums[key, price] - own_members < count:
                return False
        return True

    def _able(self, price_micro_usd_h: int, rows: int | slice = slice(None)) -> Mask:
        able: Mask = self._is_ready[rows] & (self._is_used[rows] | (self._price[rows] < price_micro_usd_h))
        return able

    def _members_of(self, shape: Shape) -> Rows:
        """How many of this shape each node would hold, by row."""
        rows, members = self._room.node_table.rows_with_room(shape.resources, shape.labels)
        found = np.zeros(len(self._room.slots), dtype=np.int64)
        found[rows] = members
        return found[: len(self._is_ready)]

    def _rows(self, node_ids: Iterable[str]) -> list[int]:
        rows = (self._room.rows.get(node_id) for node_id in node_ids)
        return [row for row in rows if row is not None and row < len(self._is_ready)]


def _key(shape: Shape) -> _Key:
    return tuple(sorted(shape.resources.items())), tuple(sorted(shape.labels.items()))
