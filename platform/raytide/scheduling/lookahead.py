"""The demand that is still to be placed in this decision, and its value for the room that a new node leaves over.

Shapes are placed one after another. A node that costs a little more for the first may cost less for all, when its
remaining room holds others that would need nodes of their own: their value is subtracted from its price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import Resources, round_up_gpu_share
from raytide.scheduling.offerings import Floats, Ints, Offerings

MOST = 16
"""The largest shapes only are considered."""

_EPS = 1e-9


@dataclass(frozen=True, slots=True)
class PendingShape:
    shape: Shape
    count: int
    allowed_types: frozenset[str] | None = None


class PendingDemand:
    """Shapes in the order of their placement; `advance` is called before each of them is placed."""

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
        self._turn = 0

    def advance(self) -> None:
        self.remaining[self._turn] = 0.0
        self._turn += 1

    def value(self, need: Resources, rows: Ints, members: Ints, left: Floats) -> tuple[Floats, Floats]:
        """Returns, for each of these offerings with `members` of this need on a node, the value of its remaining room
        for other shapes, and how many of each shape it would hold. `left`: how many of each shape remain.
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
        """Returns the lowest price of a member of this shape on nodes of its own."""
        members = self._table.members(shape)
        holding = members > 0
        return float((self._table.cost[holding] / members[holding]).min()) if holding.any() else 0.0

    def _is_known(self, shape: Shape) -> bool:
        """Returns True if it needs something, and only resources that a node type has: others would seem to fit."""
        return any(shape.resources.values()) and shape.resources.keys() <= self._table.columns.keys()
