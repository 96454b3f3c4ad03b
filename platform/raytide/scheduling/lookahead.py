"""The demand that is still to be placed in this decision, and the value of a new node's free resources to this demand.

Shapes are placed one after another. A node that costs a little more for the first shape may be cheaper for all shapes
together. This is the case if its remaining resources hold later shapes that would otherwise need nodes of their own.
The resources are then held for the later shapes. Without the hold, shapes that are placed in between would take them,
and more nodes would be needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import Resources, round_up_gpu_share
from raytide.scheduling.node_table import NodeTable
from raytide.scheduling.offerings import Floats, Ints, Offerings

MOST = 16
"""The number of pending shapes that are considered, the most expensive first."""

_EPS = 1e-9

Hold = tuple[tuple[int, ...], int]
"""The rows of nodes in the node table, and for each of them the number of members held."""


@dataclass(frozen=True, slots=True)
class PendingShape:
    shape: Shape
    count: int
    allowed_types: frozenset[str] | None = None


class PendingDemand:
    """The shapes that are still to be placed, in order. Call `advance` before each shape is placed.

    Changes to a shallow copy do not affect the original.
    """

    def __init__(self, offerings: Offerings, shapes: Sequence[PendingShape]) -> None:
        self._table = table = offerings.table
        self._needs = np.array([table.vector(round_up_gpu_share(pending.shape.resources)) for pending in shapes])
        self.remaining = np.array(
            [pending.count if self._is_known(pending.shape) else 0 for pending in shapes], dtype=np.float64
        )
        self._prices = np.array([self._standalone_price(pending.shape) for pending in shapes])
        self._eligible = [
            table.matching(pending.shape.labels) & table.allowed(pending.allowed_types) for pending in shapes
        ]
        self._by_price = sorted(range(len(shapes)), key=lambda at: (-self._prices[at], at))
        self._resources = [round_up_gpu_share(pending.shape.resources) for pending in shapes]
        self._held: dict[int, tuple[Hold, ...]] = {}  # keyed by shape
        self._turn = 0

    def advance(self, node_table: NodeTable) -> bool:
        """Advances to the next shape, and frees the resources that were held for that next shape. Returns whether any
        resources were held for it.
        """
        self.remaining = self.remaining.copy()
        self.remaining[self._turn] = 0.0
        self._turn += 1
        return self._free(self._turn - 1, node_table)

    def hold(self, node_table: NodeTable, rows: Sequence[int], fits: Floats) -> None:
        """Holds resources for pending shapes on each of the nodes `rows`. `fits[i]` is the number of members of shape i
        for which resources are held on each node.
        """
        for at in np.flatnonzero(fits).tolist():
            members = int(fits[at])
            node_table.reserve_each(rows, self._resources[at], [members] * len(rows))
            self._held = {**self._held, at: (*self._held.get(at, ()), (tuple(rows), members))}

    def free_all(self, node_table: NodeTable) -> bool:
        """Frees all held resources. Returns whether any were held."""
        are_freed = [self._free(at, node_table) for at in self._held]
        return any(are_freed)

    def _free(self, at: int, node_table: NodeTable) -> bool:
        holds = self._held.get(at, ())
        for rows, members in holds:
            node_table.reserve_each(rows, self._resources[at], [-members] * len(rows))
        self._held = {key: holds for key, holds in self._held.items() if key != at}
        return bool(holds)

    def value(self, need: Resources, rows: Ints, members: Ints, left: Floats) -> tuple[Floats, Floats]:
        """Computes what is left on a node of each offering in `rows` after a placement, and what the pending shapes can
        use of it. The placement puts `members[i]` members on a node of the offering `rows[i]`. Each of these members
        needs the resources `need`. `left` holds, for each pending shape, the number of members that are still to be
        placed.

        Returns two arrays. The first is the value of the remaining resources to the pending shapes, in micro-dollars
        an hour. The second is the number of members of each shape that would fit into the remaining resources.
        """
        need_R = self._table.vector(round_up_gpu_share(need))
        free_PR = self._table.totals_PR[rows] - members[:, None] * need_R
        value, fits = np.zeros(len(rows)), np.zeros((len(rows), len(left)))
        for at in [at for at in self._by_price if left[at] > 0][:MOST]:
            used = self._needs[at] > 0
            fit = np.floor((free_PR[:, used] + _EPS) / self._needs[at][used]).min(axis=1)
            fit = np.clip(fit, 0.0, left[at]) * self._eligible[at][rows]
            free_PR -= fit[:, None] * self._needs[at]
            value += fit * self._prices[at]
            fits[:, at] = fit
        return value, fits

    def _standalone_price(self, shape: Shape) -> float:
        """Returns the lowest price of a member of this shape on separate nodes."""
        members = self._table.members(shape)
        holding = members > 0
        return float((self._table.cost[holding] / members[holding]).min()) if holding.any() else 0.0

    def _is_known(self, shape: Shape) -> bool:
        """Returns True if the shape needs any resource, and only resources that a node type has. Other shapes would
        seem to fit anywhere.
        """
        return any(shape.resources.values()) and shape.resources.keys() <= self._table.columns.keys()
