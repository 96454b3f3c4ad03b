"""Where members would sit: first on nodes that are there, then on the cheapest that could be bought. Takes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from raytide.core.coming import Coming
from raytide.core.gang import Shape
from raytide.core.grid import Floats, Grid
from raytide.core.market import Basket, Market, Offer
from raytide.core.want import Want

SPREAD_EXTRA = 0.2
"""What a replica may cost more in another zone, while one zone holds half of its endpoint or more."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One member's place. A new node has the id under which the plan buys it, so that members can share it."""

    node_id: str
    node_type: str
    zone: str
    is_new: bool


@dataclass(slots=True)
class Choice:
    """What one placement would take."""

    shape: Shape
    there: list[tuple[int, int]] = field(default_factory=list)
    """Rows of the grid, with members."""
    new: list[tuple[Offer, int, int]] = field(default_factory=list)
    """Offers, with nodes and members."""
    basket: Basket = field(default_factory=Basket)
    count: int = 0
    left: Floats | None = None
    """How many of each ask that is coming are not yet thought of as filling up nodes that this buys."""

    @property
    def rating(self) -> tuple[int, float]:
        """The smaller the better: most members, then cheapest."""
        return -self.count, sum(offer.cost_micro_usd_h * nodes for offer, nodes, _ in self.new)

    def would_break(self, pace: int, needed: int) -> bool:
        """Whether with so many new nodes fewer would sit than are needed at least."""
        members = sum(members for _, members in self.there)
        sizes = [members // nodes for _, nodes, members in self.new for _ in range(nodes)]
        return members + sum(sizes[:pace]) < needed


def choose(market: Market, grid: Grid, seats: Sequence[Seat], coming: Coming | None, want: Want) -> Choice:
    """As many of the members that are wanted as there is room for. `seats`: by row of the grid."""
    choice = Choice(want.shape, left=None if coming is None else coming.left)
    rows, copies = grid.fitting(want.shape.resources, want.shape.labels, enough=want.count)
    for row, fit in zip(rows.tolist(), copies.tolist(), strict=True):
        if choice.count >= want.count:
            break
        choice.there.append((row, min(fit, want.count - choice.count)))
        choice.count += choice.there[-1][1]
    zones = Counter(want.spread_from or ())
    for row, members in choice.there:
        zones[seats[row].zone] += members
    while choice.count < want.count and (want.max_new is None or choice.basket.size < want.max_new):
        found = _cheapest(market, coming, want, choice, zones)
        if found is None:
            break
        offer, fit, nodes = found
        members = min(nodes * fit, want.count - choice.count)
        choice.new.append((offer, nodes, members))
        choice.basket.add(offer, nodes)
        choice.count += members
        zones[offer.zone] += members
    return choice


def _cheapest(
    market: Market, coming: Coming | None, want: Want, choice: Choice, zones: Counter[str]
) -> tuple[Offer, int, int] | None:
    """The best offer, how many members a node of it holds, and how many of its nodes to take at once."""
    lacking = want.count - choice.count
    able = [
        (offer, fit)
        for offer, fit in market.holding(want.shape)
        if (want.menu is None or offer.node_type.name in want.menu) and market.most(offer, choice.basket)
    ]
    if not able:
        return None
    worth, fits = _worth_of_the_rest(market, coming, want.shape, able, lacking, choice.left)
    options = [
        (max(0.0, offer.cost_micro_usd_h - worth[at]) / min(fit, lacking), offer.cost_micro_usd_h, at)
        for at, (offer, fit) in enumerate(able)
    ]
    best = min(options)
    if want.spread_from is not None:
        if zones[able[best[2]][0].zone] * 2 > sum(zones.values()):
            near = [option for option in options if option[0] <= best[0] * (1 + SPREAD_EXTRA)]
            best = min(near, key=lambda option: (zones[able[option[2]][0].zone], option))
        return *able[best[2]], 1
    offer, fit = able[best[2]]
    nodes = min(max(1, lacking // fit), market.most(offer, choice.basket))
    if want.max_new is not None:
        nodes = min(nodes, want.max_new - choice.basket.size)
    if choice.left is not None and (shared := fits[best[2]]).any():
        full = choice.left[shared > 0] // shared[shared > 0]
        nodes = int(min(nodes, max(1.0, full.min())))
        choice.left = np.maximum(0.0, choice.left - nodes * shared)
    return offer, fit, nodes


def _worth_of_the_rest(
    market: Market,
    coming: Coming | None,
    shape: Shape,
    able: Sequence[tuple[Offer, int]],
    lacking: int,
    left: Floats | None,
) -> tuple[list[float], Floats]:
    """What those who still wait would pay for what a node of each offer leaves over, and how many it would hold."""
    if coming is None or left is None:
        return [0.0] * len(able), np.zeros((len(able), 0))
    at = {offer.name: row for row, offer in enumerate(market.offers)}
    rows = [at[offer.name] for offer, _ in able]
    members = np.zeros(len(at))
    members[rows] = [min(fit, lacking) for _, fit in able]
    worth, fits = coming.worth(shape.resources, members, left)
    return worth[rows].tolist(), fits[rows]
