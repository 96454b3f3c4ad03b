"""Rescheduling simulation: decides whether the tenants of a node fit on other ready nodes.

The targets are nodes in use, and idle nodes that are cheaper than the tenants' node. An idle node that is not cheaper
is no target, because it should itself be terminated. Lookups are cached by shape, because on thousands of nodes nearly
all tenants fit nowhere else.
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
"""The most full placements that are tried in one decision."""

_Key = tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str], ...]]


class ReschedulingSimulator:
    """Places tenants on other nodes. It reserves capacity directly in the plan's scheduling state."""

    def __init__(self, state: SchedulingState) -> None:
        self._room, self._tries = state, MAX_TRIES
        views = {view.node.id: view for view in state.snapshot.nodes}
        there = [views[slot.node_id] for slot in state.slots if slot.node_id in views]  # bought ones come last
        self._is_ready = np.array([view.node.state is NodeState.READY for view in there], dtype=np.bool_)
        self._is_used = ~state.node_table.have_free([view.stable_total for view in there])
        self._price = np.array([view.node.price_micro_usd_h for view in there], dtype=np.int64)
        self._members: dict[_Key, Rows] = {}
        self._sums: dict[tuple[_Key, int], int] = {}

    def exclude(self, node_ids: Iterable[str]) -> None:
        """Excludes these nodes as targets from now on."""
        self._is_ready[self._rows(node_ids)] = False
        self._sums.clear()

    def place(self, olds: Sequence[Tenants]) -> list[Slot] | None:
        """Reserves capacity for all tenants of these nodes and returns the slots. Returns None if not all tenants
        fit.
        """
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
        """Returns whether each shape of the tenants would fit if it were the only shape to place. The check is fast. If
        it returns False, the tenants certainly do not fit. If it returns True, they may still not fit together.
        """
        own, price, shape = self._rows([old.view.node.id]), old.price_micro_usd_h, {_key(s): s for s in old.shapes}
        for key, count in Counter(map(_key, old.shapes)).items():
            if key not in self._members:
                self._members[key] = self._members_of(shape[key])
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
        """Returns the number of members of this shape that each node has room for, by row."""
        rows, members = self._room.node_table.rows_with_room(shape.resources, shape.labels)
        found = np.zeros(len(self._room.slots), dtype=np.int64)
        found[rows] = members
        return found[: len(self._is_ready)]

    def _rows(self, node_ids: Iterable[str]) -> list[int]:
        rows = (self._room.rows.get(node_id) for node_id in node_ids)
        return [row for row in rows if row is not None and row < len(self._is_ready)]


def _key(shape: Shape) -> _Key:
    return tuple(sorted(shape.resources.items())), tuple(sorted(shape.labels.items()))
