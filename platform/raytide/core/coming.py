"""Who still waits for a seat in this decision, and what they would pay for what a node leaves over.

Shapes are seated one after another. A node that costs a little more for the first of them may cost less for all, when
the rest of it holds others that would need nodes of their own: their worth is taken off its price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.core.fleet import Resources, whole_shares
from raytide.core.gang import Shape
from raytide.core.market import Market

MOST = 16
"""Shapes that are looked at: the largest."""

_EPS = 1e-9
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ask:
    shape: Shape
    count: int
    menu: frozenset[str] | None = None


class Coming:
    """Asks in the order in which they will be seated; `next` when it is the turn of the first of them."""

    def __init__(self, market: Market, asks: Sequence[Ask]) -> None:
        names = sorted({name for offer in market.offers for name in offer.node_type.resources})
        self._column = {name: at for at, name in enumerate(names)}
        self._totals = np.array([self._vector(offer.node_type.resources) for offer in market.offers])
        self._needs = [self._vector(whole_shares(ask.shape.resources)) for ask in asks]
        self.left = np.array([ask.count if self._is_known(ask.shape) else 0 for ask in asks], dtype=np.float64)
        self._worth = [
            min((offer.cost_micro_usd_h / fit for offer, fit in market.holding(ask.shape)), default=0.0) for ask in asks
        ]
        menus = {menu: _in_menu(market, menu) for menu in {ask.menu for ask in asks}}
        self._able = [np.array(market.carrying(ask.shape.labels), dtype=np.bool_) & menus[ask.menu] for ask in asks]
        self._turn = 0

    def next(self) -> None:
        self.left[self._turn] = 0.0
        self._turn += 1

    def worth(self, need: Resources, members: Floats, left: Floats) -> tuple[Floats, Floats]:
        """For each offer of the market, with so many members of this need on it: what others would pay for the rest,
        and how many of each ask it would hold. `left`: how many are left of each."""
        need_R = self._vector(whole_shares(need))
        free_PR = self._totals - members[:, None] * need_R
        worth, fits = np.zeros(len(free_PR)), np.zeros((len(free_PR), len(left)))
        waiting = np.flatnonzero(left > 0)
        for at in sorted(waiting, key=lambda at: (-self._worth[at], at))[:MOST]:
            used = self._needs[at] > 0
            fit = np.floor((free_PR[:, used] + _EPS) / self._needs[at][used]).min(axis=1)
            fit = np.clip(fit, 0.0, left[at]) * self._able[at]
            free_PR -= fit[:, None] * self._needs[at]
            worth += fit * self._worth[at]
            fits[:, at] = fit
        return worth, fits

    def _is_known(self, shape: Shape) -> bool:
        """Whether it asks for something, and for nothing that no node type has: that would look as if it fits."""
        return any(shape.resources.values()) and shape.resources.keys() <= self._column.keys()

    def _vector(self, amounts: Resources) -> Floats:
        vector = np.zeros(len(self._column))
        for name, amount in amounts.items():
            if (at := self._column.get(name)) is not None:
                vector[at] = amount
        return vector


def _in_menu(market: Market, menu: frozenset[str] | None) -> NDArray[np.bool_]:
    return np.array([menu is None or offer.node_type.name in menu for offer in market.offers], dtype=np.bool_)
