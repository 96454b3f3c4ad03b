"""What can be bought now, and what it costs: pools that do not rest, within every maximum and every limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raytide.core.clock import utc
from raytide.core.fleet import Market as Kind
from raytide.core.fleet import NodeType, labels_match
from raytide.core.gang import Shape
from raytide.core.money import format_usd
from raytide.core.shortfall import copies
from raytide.core.snapshot import Limits, Pool, Snapshot

RESTART_S = 600.0
"""What the loss of a node costs of its time: a start, and work that is done twice."""
RATE_WINDOW_S = 60.0

Refusal = tuple[Literal["stock", "capacity", "budget", "rate"], str]


_Key = tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str], ...]]
"""Resources and labels of a shape, hashable."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A pool: nodes of one type in one zone."""

    node_type: NodeType
    zone: str
    price_micro_usd_h: int
    deaths_per_h: float
    cost_micro_usd_h: float
    """The price of an hour of use, with what is lost when nodes are taken back."""
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.node_type.name} in {self.zone}"


@dataclass(slots=True)
class Basket:
    """What one placement would buy, before it is known whether all of it can be had."""

    size: int = 0
    price_micro_usd_h: int = 0
    of_type: Counter[str] = field(default_factory=Counter)

    def add(self, offer: Offer, nodes: int) -> None:
        self.size += nodes
        self.price_micro_usd_h += nodes * offer.price_micro_usd_h
        self.of_type[offer.node_type.name] += nodes


@dataclass(slots=True)
class Market:
    at_s: float
    offers: tuple[Offer, ...]
    pools: Mapping[tuple[str, str], Pool]
    limits: Limits
    burn_micro_usd_h: int
    """The price of all nodes that are not gone."""
    left: dict[str, int]
    """Nodes of each type that its maximum still allows; one counts until the provider has ended it."""
    launches_left: int | None
    """Within the limit of a minute; None without one."""
    _held: dict[_Key, tuple[tuple[Offer, int], ...]] = field(default_factory=dict)
    _carrying: dict[tuple[tuple[str, str], ...], tuple[bool, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, snapshot: Snapshot) -> Market:
        there = Counter(view.node.type for view in snapshot.nodes)
        pace = snapshot.limits.launches_per_min
        lately = sum(snapshot.at_s - view.node.requested_at_s < RATE_WINDOW_S for view in snapshot.nodes)
        return cls(
            at_s=snapshot.at_s,
            offers=_offers(snapshot),
            pools={(pool.node_type, pool.zone): pool for pool in snapshot.pools},
            limits=snapshot.limits,
            burn_micro_usd_h=sum(view.node.price_micro_usd_h for view in snapshot.nodes),
            left={t.name: t.max_nodes - there[t.name] for t in snapshot.node_types},
            launches_left=None if pace is None else max(0, pace - lately),
        )

    def holding(self, shape: Shape) -> tuple[tuple[Offer, int], ...]:
        """Offers whose nodes would hold members of this shape, with how many each."""
        key = (tuple(shape.resources.items()), tuple(shape.labels.items()))
        if (found := self._held.get(key)) is None:
            types = {offer.node_type.name: offer.node_type for offer in self.offers}
            many = {name: copies(shape.resources, node_type.resources) for name, node_type in types.items()}
            carrying = self.carrying(shape.labels)
            found = tuple(
                (offer, many[offer.node_type.name])
                for offer, carries in zip(self.offers, carrying, strict=True)
                if carries and many[offer.node_type.name]
            )
            self._held[key] = found
        return found

    def could_hold(self, shape: Shape, count: int) -> bool:
        """Whether an empty fleet with every pool in stock would hold so many; `impossible` says why not."""
        most = {o.node_type.name: o.node_type.max_nodes * fit for o, fit in self.holding(shape)}
        return sum(most.values()) >= count

    def carrying(self, selector: Mapping[str, str]) -> tuple[bool, ...]:
        """Of each offer, whether its nodes carry the labels that are asked for."""
        key = tuple(selector.items())
        if (found := self._carrying.get(key)) is None:
            found = self._carrying[key] = tuple(labels_match(selector, offer.labels) for offer in self.offers)
        return found

    def most(self, offer: Offer, basket: Basket) -> int:
        """How many of its nodes can be had beside what is in the basket."""
        if self.retry_at_s(offer) > self.at_s:
            return 0
        left = self.left[offer.node_type.name] - basket.of_type[offer.node_type.name]
        cap = self._cap(offer)
        if cap is not None:
            spare = cap - self.burn_micro_usd_h - basket.price_micro_usd_h
            left = min(left, spare // max(1, offer.price_micro_usd_h))
        return max(0, left)

    def refusal(self, offer: Offer) -> Refusal | None:
        """Why not one node of it can be had now, in words; None when it can."""
        if (retry_at_s := self.retry_at_s(offer)) > self.at_s:
            why = self.pools[(offer.node_type.name, offer.zone)].reason
            return "stock", f"rests until {utc(retry_at_s)}" + (f": {why}" if why else "")
        if self.left[offer.node_type.name] <= 0:
            return "capacity", f"all {offer.node_type.max_nodes} that max_nodes allows are there"
        cap = self._cap(offer)
        if cap is not None and self.burn_micro_usd_h + offer.price_micro_usd_h > cap:
            kind = "hard" if cap == self.limits.hard_micro_usd_h else "soft"
            after = format_usd(self.burn_micro_usd_h + offer.price_micro_usd_h)
            return "budget", f"the fleet would cost {after}/h; the {kind} limit is {format_usd(cap)}/h"
        if self.launches_left is not None and self.launches_left <= 0:
            return "rate", f"{self.limits.launches_per_min} nodes were launched within a minute"
        return None

    def buy(self, offer: Offer) -> None:
        self.left[offer.node_type.name] -= 1
        self.burn_micro_usd_h += offer.price_micro_usd_h
        if self.launches_left is not None:
            self.launches_left = max(0, self.launches_left - 1)

    def give_back(self, offer: Offer) -> None:
        """Undo `buy`."""
        self.left[offer.node_type.name] += 1
        self.burn_micro_usd_h -= offer.price_micro_usd_h
        if self.launches_left is not None:
            self.launches_left += 1

    def retry_at_s(self, offer: Offer) -> float:
        pool = self.pools.get((offer.node_type.name, offer.zone))
        return pool.retry_at_s if pool else 0.0

    def limits_in_words(self) -> str:
        """What the fleet costs, and what it may; empty when it may cost anything."""
        soft, hard = self.limits.soft_micro_usd_h, self.limits.hard_micro_usd_h
        words = [f"above {format_usd(soft)}/h only spot is bought"] if soft is not None else []
        words += [f"above {format_usd(hard)}/h nothing is"] if hard is not None else []
        return f"the fleet costs {format_usd(self.burn_micro_usd_h)}/h, and {', '.join(words)}" if words else ""

    def _cap(self, offer: Offer) -> int | None:
        """Spot goes up to the hard limit, the rest up to the soft one."""
        soft, hard = self.limits.soft_micro_usd_h, self.limits.hard_micro_usd_h
        if offer.node_type.market is Kind.SPOT or soft is None:
            return hard
        return soft if hard is None else min(soft, hard)


def _offers(snapshot: Snapshot) -> tuple[Offer, ...]:
    """In the order of node types and of their zones."""
    quotes = {(quote.node_type, quote.zone): quote for quote in snapshot.quotes}
    found = []
    for node_type in snapshot.node_types:
        for zone in node_type.zones:
            quote = quotes.get((node_type.name, zone))
            known = None if quote is None else quote.price_micro_usd_h
            price = node_type.price_in(zone) if known is None else known
            deaths = quote.deaths_per_h if quote is not None else 0.0
            cost = price * (1.0 + deaths * RESTART_S / 3600.0)
            found.append(Offer(node_type, zone, price, deaths, cost, node_type.all_labels(zone)))
    return tuple(found)
