"""Which nodes serve an endpoint cheapest: on demand and spot by zone, with the price of missed requests in the sum.

For a number of on-demand nodes, spot nodes are added one at a time: each step takes the one with the least of its
price, its start spread over the time it will live, and the misses that are expected with it, those in the time after
spot nodes are taken back included. The best prefix of the best of these paths is the plan, so that replica target,
spread and spare nodes come out of one sum. The search goes from as many on demand as there are, up and down, while that
helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

ONDEMAND = ""
"""The name of the one pool that is never taken back."""

LACKING_USD_H = 1e6

MOST_MOVES = 4
PLATEAU = 0.5
"""While more than this is missed one node more may change nothing, and two all."""

LONGEST_USE_S = 3600.0
"""The start of a new node is spread over no more than this."""


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """A zone's spot nodes, or on-demand nodes: what there is and what could be bought."""

    name: str
    usd_h: float
    held: int
    """Nodes of ours that stay, launching ones included."""
    most: int
    """How many it is worth trying to have."""
    deaths_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Risk:
    recovery_s: float
    """From a death to the replacement's first request."""
    lost_share: float
    """Of a zone's nodes, how many go when one goes."""


@dataclass(frozen=True, slots=True)
class Mix:
    """How many nodes of each pool should be there."""

    nodes: Mapping[str, int]
    usd_h: float
    missed_share: float

    @property
    def total(self) -> int:
        return sum(self.nodes.values())


def choose(
    offers: Sequence[PoolOffer],
    misses: Sequence[float],
    *,
    usd_per_missed_share_h: float,
    risk: Risk,
    cold_start_s: float,
    least: int,
    most: int,
) -> Mix:
    """`misses`: the share of requests that miss with 0, 1, 2... replicas. `usd_per_missed_share_h`: what it is worth
    not to miss any of the requests of an hour."""
    search = _Search(offers, misses, usd_per_missed_share_h, risk, cold_start_s, least, most)
    held = next((offer.held for offer in offers if offer.name == ONDEMAND), 0)
    best = search.with_ondemand(held)
    for step in (1, -1):
        ondemand = held
        while 0 <= ondemand + step <= most:
            ondemand += step
            found = search.with_ondemand(ondemand)
            if found.cost_usd_h < best.cost_usd_h:
                best = found
            elif found.mix.missed_share < PLATEAU:
                break
    return search.spread(best).mix


@dataclass(frozen=True, slots=True)
class _Found:
    mix: Mix
    cost_usd_h: float
    """What is missed included, and a great deal for each node that is lacking."""


@dataclass(frozen=True, slots=True)
class _Search:
    offers: Sequence[PoolOffer]
    misses: Sequence[float]
    usd_per_missed_share_h: float
    risk: Risk
    cold_start_s: float
    least: int
    most: int

    def with_ondemand(self, ondemand: int) -> _Found:
        """The best fleet with so many nodes on demand: spot is added where it helps most for its price."""
        path = _Path(self.offers, self.misses, self.risk)
        spent_usd_h = 0.0
        for offer in self.offers:
            if offer.name == ONDEMAND:
                spent_usd_h = sum(_usd_h(offer, chosen, self.cold_start_s) for chosen in range(ondemand))
                path.nodes[ONDEMAND] = ondemand
        best = self._found(path, spent_usd_h, self.misses[ondemand])
        for _ in range(ondemand, self.most):
            steps = [
                (usd_h + self.usd_per_missed_share_h * missed, path.nodes[offer.name], offer.name, usd_h, missed)
                for offer, missed in path.steps()
                if offer.name != ONDEMAND
                for usd_h in (_usd_h(offer, path.nodes[offer.name], self.cold_start_s),)
            ]
            if not steps:
                break
            _, _, name, usd_h, missed = min(steps)
            path.take(name)
            spent_usd_h += usd_h
            found = self._found(path, spent_usd_h, missed)
            best = min(best, found, key=lambda found: found.cost_usd_h)
            if spent_usd_h > best.cost_usd_h:
                break
        return best

    def spread(self, best: _Found) -> _Found:
        """Nodes move from zone to zone, one or half of them at a time, while that helps."""
        spot = [offer for offer in self.offers if offer.name != ONDEMAND]
        for _ in range(MOST_MOVES):
            before = best
            for giver in spot:
                there = before.mix.nodes.get(giver.name, 0)
                for count in {1, there // 2} - {0} if there else ():
                    for taker in spot:
                        nodes = dict(before.mix.nodes)
                        nodes[giver.name] = there - count
                        nodes[taker.name] = nodes.get(taker.name, 0) + count
                        if taker is not giver and nodes[taker.name] <= max(taker.most, taker.held):
                            found = self._of(nodes)
                            best = found if found.cost_usd_h < best.cost_usd_h - 1e-9 else best
            if best is before:
                break
        return best

    def _of(self, nodes: Mapping[str, int]) -> _Found:
        path = _Path(self.offers, self.misses, self.risk)
        path.nodes.update(nodes)
        spent_usd_h = sum(
            _usd_h(offer, chosen, self.cold_start_s)
            for offer in self.offers
            for chosen in range(path.nodes[offer.name])
        )
        return self._found(path, spent_usd_h, path.missed())

    def _found(self, path: _Path, spent_usd_h: float, missed: float) -> _Found:
        lacking = max(0, self.least - sum(path.nodes.values()))
        cost = spent_usd_h + self.usd_per_missed_share_h * missed + LACKING_USD_H * lacking
        return _Found(Mix(path.taken(), spent_usd_h, missed), cost)


class _Path:
    """The nodes that were chosen so far, and what would be missed with one more of any pool."""

    def __init__(self, offers: Sequence[PoolOffer], misses: Sequence[float], risk: Risk) -> None:
        self.nodes = {offer.name: 0 for offer in offers}
        self._offers, self._misses, self._risk = offers, misses, risk
        self._hole = {o.name: min(1.0, o.deaths_per_h * risk.recovery_s / 3600.0) for o in offers}
        """The share of time in which a zone's nodes were just taken back."""

    def taken(self) -> dict[str, int]:
        return {name: count for name, count in self.nodes.items() if count}

    def take(self, name: str) -> None:
        self.nodes[name] += 1

    def steps(self) -> Iterator[tuple[PoolOffer, float]]:
        """Every pool that has one more, with the share that is missed then."""
        total = sum(self.nodes.values()) + 1
        fine = self._at(total)
        held = [(name, count) for name, count in self.nodes.items() if count and name != ONDEMAND]
        for offer in self._offers:
            if self.nodes[offer.name] >= max(offer.most, offer.held):
                continue
            missed = fine
            for name, count in held:
                if name != offer.name:
                    missed += self._hole[name] * (self._after(total, count) - fine)
            if offer.name != ONDEMAND:
                after = self._after(total, self.nodes[offer.name] + 1)
                missed += self._hole[offer.name] * (after - fine)
            yield offer, min(missed, 1.0)

    def missed(self) -> float:
        """With the nodes that are chosen."""
        total = sum(self.nodes.values())
        fine = self._at(total)
        spot = [(name, count) for name, count in self.nodes.items() if count and name != ONDEMAND]
        holes = sum(self._hole[name] * (self._after(total, count) - fine) for name, count in spot)
        return min(fine + holes, 1.0)

    def _after(self, total: int, count: int) -> float:
        """The share that misses when a zone with `count` nodes loses some."""
        return self._at(total - max(1.0, self._risk.lost_share * count))

    def _at(self, replicas: float) -> float:
        if replicas <= 0:
            return self._misses[0]
        low = int(replicas)
        if low + 1 >= len(self._misses):
            return self._misses[-1]
        return self._misses[low] + (replicas - low) * (self._misses[low + 1] - self._misses[low])


def _usd_h(offer: PoolOffer, chosen: int, cold_start_s: float) -> float:
    """An hour of the next node: what its replacements' starts cost and, if it is new, its own over its likely life."""
    usd_h = offer.usd_h * (1.0 + offer.deaths_per_h * cold_start_s / 3600.0)
    if chosen < offer.held:
        return usd_h
    life_s = 3600.0 / max(offer.deaths_per_h, 3600.0 / LONGEST_USE_S)
    return usd_h + offer.usd_h * cold_start_s / life_s
