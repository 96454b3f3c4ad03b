"""What can be bought now, and what it costs: pools that do not rest, within every maximum and every limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from raytide.core.clock import utc
from raytide.core.money import format_usd
from raytide.core.objects.gang import Shape
from raytide.core.objects.snapshot import Limits, Pool, Snapshot
from raytide.scheduling.offerings import Ints, Mask, Offering, OfferingTable

RESTART_S = 600.0
"""What the loss of a node costs of its time: a start, and work that is done twice."""
RATE_WINDOW_S = 60.0

Refusal = tuple[Literal["stock", "capacity", "budget", "rate"], str]

_NO_CAP = 2**62


@dataclass(slots=True)
class Purchase:
    """What one placement would buy, before it is known whether all of it can be had."""

    size: int = 0
    price_micro_usd_h: int = 0
    of_type: Counter[str] = field(default_factory=Counter)

    def add(self, offer: Offering, nodes: int) -> None:
        self.size += nodes
        self.price_micro_usd_h += nodes * offer.price_micro_usd_h
        self.of_type[offer.node_type.name] += nodes


_NOTHING = Purchase()


@dataclass(slots=True)
class Offerings:
    at_s: float
    shelf: OfferingTable
    pools: Mapping[tuple[str, str], Pool]
    limits: Limits
    burn_micro_usd_h: int
    """The price of all nodes that are not gone."""
    left: Ints
    """Nodes of each type that its maximum still allows; one counts until the provider has ended it."""
    launches_left: int | None
    """Within the limit of a minute; None without one."""
    backed_off: Mask
    """By offer."""
    caps: Ints | None
    """What the fleet may cost with a node of each offer; None when it may cost anything."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> Offerings:
        there = Counter(view.node.type for view in snapshot.nodes)
        pace = snapshot.limits.launches_per_min
        lately = sum(snapshot.at_s - view.node.requested_at_s < RATE_WINDOW_S for view in snapshot.nodes)
        shelf, pools = OfferingTable(_offers(snapshot)), {(pool.node_type, pool.zone): pool for pool in snapshot.pools}
        most = {node_type.name: node_type.max_nodes for node_type in snapshot.node_types}
        resting = [
            (pool := pools.get((offer.node_type.name, offer.zone))) is not None and pool.retry_at_s > snapshot.at_s
            for offer in shelf.offers
        ]
        return cls(
            at_s=snapshot.at_s,
            shelf=shelf,
            pools=pools,
            limits=snapshot.limits,
            burn_micro_usd_h=sum(view.node.price_micro_usd_h for view in snapshot.nodes),
            left=np.array([most[name] - there[name] for name in shelf.types], dtype=np.int64),
            launches_left=None if pace is None else max(0, pace - lately),
            backed_off=np.array(resting, dtype=np.bool_),
            caps=_caps(shelf, snapshot.limits),
        )

    def copy(self) -> Offerings:
        return replace(self, left=self.left.copy())

    @property
    def offers(self) -> tuple[Offering, ...]:
        return self.shelf.offers

    def holding(self, shape: Shape) -> list[tuple[Offering, int]]:
        """Offers whose nodes would hold members of this shape, with how many each."""
        members = self.shelf.members(shape)
        return [(self.shelf.offers[row], int(members[row])) for row in np.flatnonzero(members).tolist()]

    def could_hold(self, shape: Shape, count: int) -> bool:
        """Whether an empty fleet with every pool in stock would hold so many; `impossible` says why not."""
        most = {o.node_type.name: o.node_type.max_nodes * fit for o, fit in self.holding(shape)}
        return sum(most.values()) >= count

    def can_have(self, basket: Purchase = _NOTHING) -> Ints:
        """How many nodes of each offer there are to be had beside what is in the basket."""
        left = self.left[self.shelf.type_of]
        if basket.size:
            taken = np.zeros_like(self.left)
            for name, nodes in basket.of_type.items():
                taken[self.shelf.types[name]] = nodes
            left -= taken[self.shelf.type_of]
        if self.caps is not None:
            spare = self.caps - self.burn_micro_usd_h - basket.price_micro_usd_h
            left = np.minimum(left, spare // np.maximum(1, self.shelf.price))
        left[self.backed_off] = 0
        return np.maximum(0, left)

    def most(self, shape: Shape) -> int:
        """How many members of this shape nodes that can be had would hold; of each type in the zone that has most."""
        best = np.zeros_like(self.left)
        np.maximum.at(best, self.shelf.type_of, self.can_have() * self.shelf.members(shape))
        return int(best.sum())

    def left_of(self, node_type: str) -> int:
        return int(self.left[self.shelf.types[node_type]])

    def refusal(self, offer: Offering) -> Refusal | None:
        """Why not one node of it can be had now, in words; None when it can."""
        if (retry_at_s := self.retry_at_s(offer)) > self.at_s:
            why = self.pools[(offer.node_type.name, offer.zone)].reason
            return "stock", f"rests until {utc(retry_at_s)}" + (f": {why}" if why else "")
        if self.left_of(offer.node_type.name) <= 0:
            return "capacity", f"all {offer.node_type.max_nodes} that max_nodes allows are there"
        if self.caps is not None and self.burn_micro_usd_h + offer.price_micro_usd_h > (
            cap := int(self.caps[offer.row])
        ):
            kind = "hard" if cap == self.limits.hard_micro_usd_h else "soft"
            after = format_usd(self.burn_micro_usd_h + offer.price_micro_usd_h)
            return "budget", f"the fleet would cost {after}/h; the {kind} limit is {format_usd(cap)}/h"
        if self.launches_left is not None and self.launches_left <= 0:
            return "rate", f"{self.limits.launches_per_min} nodes were launched within a minute"
        return None

    def buy(self, offer: Offering) -> None:
        self.left[self.shelf.types[offer.node_type.name]] -= 1
        self.burn_micro_usd_h += offer.price_micro_usd_h
        if self.launches_left is not None:
            self.launches_left = max(0, self.launches_left - 1)

    def give_back(self, offer: Offering) -> None:
        """Undo `buy`."""
        self.left[self.shelf.types[offer.node_type.name]] += 1
        self.burn_micro_usd_h -= offer.price_micro_usd_h
        if self.launches_left is not None:
            self.launches_left += 1

    def retry_at_s(self, offer: Offering) -> float:
        pool = self.pools.get((offer.node_type.name, offer.zone))
        return pool.retry_at_s if pool else 0.0

    def limits_in_words(self) -> str:
        """What the fleet costs, and what it may; empty when it may cost anything."""
        soft, hard = self.limits.soft_micro_usd_h, self.limits.hard_micro_usd_h
        words = [f"above {format_usd(soft)}/h only spot is bought"] if soft is not None else []
        words += [f"above {format_usd(hard)}/h nothing is"] if hard is not None else []
        return f"the fleet costs {format_usd(self.burn_micro_usd_h)}/h, and {', '.join(words)}" if words else ""


def _caps(shelf: OfferingTable, limits: Limits) -> Ints | None:
    """Spot goes up to the hard limit, the rest up to the soft one."""
    if limits.soft_micro_usd_h is None and limits.hard_micro_usd_h is None:
        return None
    hard = _NO_CAP if limits.hard_micro_usd_h is None else limits.hard_micro_usd_h
    soft = hard if limits.soft_micro_usd_h is None else min(limits.soft_micro_usd_h, hard)
    return np.where(shelf.is_spot, hard, soft)


def _offers(snapshot: Snapshot) -> list[Offering]:
    """In the order of node types and of their zones."""
    quotes = {(quote.node_type, quote.zone): quote for quote in snapshot.quotes}
    found: list[Offering] = []
    for node_type in snapshot.node_types:
        for zone in node_type.zones:
            quote = quotes.get((node_type.name, zone))
            known = None if quote is None else quote.price_micro_usd_h
            price = node_type.price_in(zone) if known is None else known
            deaths = quote.deaths_per_h if quote is not None else 0.0
            cost = price * (1.0 + deaths * RESTART_S / 3600.0)
            found.append(Offering(len(found), node_type, zone, price, deaths, cost, node_type.all_labels(zone)))
    return found
