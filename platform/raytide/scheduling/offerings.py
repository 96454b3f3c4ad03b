"""The offerings from which nodes can be bought, with their prices and the limits of the fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raytide.core.clock import utc
from raytide.core.money import format_usd
from raytide.core.objects.gang import Shape
from raytide.core.objects.hardware.transfer import DataInput, TransferSection
from raytide.core.objects.node import CapacityType, NodeType, Resources, labels_match, round_up_gpu_share
from raytide.core.objects.snapshot import Limits, Pool, Snapshot

RESTART_S = 600.0
"""The seconds of a node's time that its loss costs: for a restart, and for repeated work."""
RATE_WINDOW_S = 60.0

Refusal = tuple[Literal["stock", "capacity", "budget", "rate"], str]

_NO_CAP = 2**62

_EPS = 1e-9

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_Labels = tuple[tuple[str, str], ...]
_Key = tuple[tuple[tuple[str, float], ...], _Labels]


@dataclass(frozen=True, slots=True)
class Offering:
    """A pool from which nodes can be bought: one node type in one zone."""

    row: int
    node_type: NodeType
    zone: str
    price_micro_usd_h: int
    reclaims_per_h: float
    cost_micro_usd_h: float
    """The price of an hour of use, including the expected losses through reclaims."""
    labels: Mapping[str, str]

    @property
    def name(self) -> str:
        return f"{self.node_type.name} in {self.zone}"


class OfferingTable:
    """A table of all offerings. The table does not change, and all copies of `Offerings` share it."""

    def __init__(self, offerings: Sequence[Offering], transfer: TransferSection | None = None) -> None:
        self.offerings = tuple(offerings)
        self.transfer = transfer
        self.types = {
            name: at for at, name in enumerate(dict.fromkeys(offering.node_type.name for offering in offerings))
        }
        self.type_of: Ints = np.array([self.types[offering.node_type.name] for offering in offerings], dtype=np.int64)
        self.price: Ints = np.array([offering.price_micro_usd_h for offering in offerings], dtype=np.int64)
        self.cost: Floats = np.array([offering.cost_micro_usd_h for offering in offerings], dtype=np.float64)
        self.reclaims_per_h: Floats = np.array([offering.reclaims_per_h for offering in offerings], dtype=np.float64)
        self.is_spot: Mask = np.array(
            [offering.node_type.market is CapacityType.SPOT for offering in offerings], dtype=np.bool_
        )
        self.columns = {
            name: at for at, name in enumerate(sorted({name for o in offerings for name in o.node_type.resources}))
        }
        totals = [self.vector(offering.node_type.resources) for offering in offerings]
        self.totals_PR: Floats = np.array(totals).reshape(len(offerings), len(self.columns))
        self._members: dict[_Key, Ints] = {}
        self._data_cost: dict[tuple[DataInput, ...], Floats] = {}
        self._carrying: dict[_Labels, Mask] = {}
        self._in_menu: dict[frozenset[str] | None, Mask] = {}

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> OfferingTable:
        """Returns the table of the snapshot's offerings. It is cached, so that all steps of a decision use the same
        table even though they copy the snapshot.
        """
        made_of = (snapshot.node_types, snapshot.quotes, snapshot.transfer)
        for at_s, known, table in _latest:
            if at_s == snapshot.at_s and all(a is b for a, b in zip(known, made_of, strict=True)):
                return table
        table = cls(_offers(snapshot), snapshot.transfer)
        _latest[:] = [(snapshot.at_s, made_of, table)]
        return table

    def members(self, shape: Shape) -> Ints:
        """Returns, for each offering, the number of members of this shape that fit on one node. The number is 0 if the
        labels do not match.
        """
        key = tuple(shape.resources.items()), tuple(shape.labels.items())
        if (found := self._members.get(key)) is None:
            need = {name: amount for name, amount in round_up_gpu_share(shape.resources).items() if amount > 0}
            found = np.zeros(len(self.offerings), dtype=np.int64)
            if need and need.keys() <= self.columns.keys():
                used = [self.columns[name] for name in need]
                copies = (self.totals_PR[:, used] + _EPS) // np.array(list(need.values()))
                found = np.where(self.matching(shape.labels), copies.min(axis=1), 0.0).astype(np.int64)
            self._members[key] = found
        return found

    def offerings_for(self, shape: Shape) -> list[tuple[Offering, int]]:
        """Returns the offerings whose nodes can hold members of this shape, each with the number of members that fit on
        one node.
        """
        members = self.members(shape)
        return [(self.offerings[row], int(members[row])) for row in np.flatnonzero(members).tolist()]

    def data_cost(self, shapes: Iterable[Shape]) -> Floats:
        """Returns, for each offering, the hourly cost in micro-dollars of moving members' data to the offering's zone.

        The cost is for one member of each shape in `shapes`.
        """
        total = np.zeros(len(self.offerings))
        for shape in shapes:
            if shape.inputs and self.transfer is not None:
                total += self._data_cost_of(shape.inputs, self.transfer)
        return total

    def member_price(self, offering: Offering, fit: int, shape: Shape) -> float:
        """Returns the price of one member of this shape, in micro-dollars an hour. The price is the member's share of
        the node's price, plus the cost of moving the member's data.

        `fit` is the number of members that the node holds.
        """
        price = offering.price_micro_usd_h / fit
        return price + float(self.data_cost((shape,))[offering.row]) if shape.inputs else price

    def _data_cost_of(self, inputs: tuple[DataInput, ...], transfer: TransferSection) -> Floats:
        if (found := self._data_cost.get(inputs)) is None:
            found = self._data_cost[inputs] = np.array(
                [transfer.micro_usd_h(inputs, o.node_type, o.zone, o.reclaims_per_h) for o in self.offerings]
            )
        return found

    def matching(self, selector: Mapping[str, str]) -> Mask:
        """Returns, for each offering, whether its labels match the selector."""
        key = tuple(selector.items())
        if (found := self._carrying.get(key)) is None:
            found = np.array([labels_match(selector, offering.labels) for offering in self.offerings], dtype=np.bool_)
            self._carrying[key] = found
        return found

    def allowed(self, types: frozenset[str] | None) -> Mask:
        """Returns, for each offering, whether its node type is one of `types`. None allows all types."""
        if (found := self._in_menu.get(types)) is None:
            found = np.array([types is None or o.node_type.name in types for o in self.offerings], dtype=np.bool_)
            self._in_menu[types] = found
        return found

    def vector(self, amounts: Resources) -> Floats:
        """Returns the amounts as an array in the order of `columns`. Resources that no node type has are left out."""
        vector = np.zeros(len(self.columns))
        for name, amount in amounts.items():
            if (at := self.columns.get(name)) is not None:
                vector[at] = amount
        return vector

    def could_hold(self, amounts: Resources) -> Mask:
        """Returns, for each offering, whether an empty node has at least these amounts of resources."""
        if any(amount > 0 and name not in self.columns for name, amount in amounts.items()):
            return np.zeros(len(self.offerings), dtype=np.bool_)
        enough = self.totals_PR + _EPS >= self.vector(amounts)
        return np.asarray(enough.all(axis=1))


_latest: list[tuple[float, tuple[object, ...], OfferingTable]] = []
"""The last table, with the time of its snapshot and the inputs from which it was made."""


@dataclass(slots=True)
class Purchase:
    """The nodes that one placement would buy."""

    size: int = 0
    price_micro_usd_h: int = 0
    of_type: Counter[str] = field(default_factory=Counter)

    def add(self, offering: Offering, nodes: int) -> None:
        self.size += nodes
        self.price_micro_usd_h += nodes * offering.price_micro_usd_h
        self.of_type[offering.node_type.name] += nodes


_NOTHING = Purchase()


@dataclass(slots=True)
class Offerings:
    at_s: float
    table: OfferingTable
    pools: Mapping[tuple[str, str], Pool]
    limits: Limits
    burn_micro_usd_h: int
    """The price of all nodes that are not gone."""
    left: Ints
    """The number of nodes of each type that `max_nodes` still allows. A node counts until the provider has ended it."""
    total_left: int | None
    """The same for all types together; None without a limit."""
    launches_left: int | None
    """The launches that are left in this minute. Negative after a gang that exceeds them, None without a limit."""
    backed_off: Mask
    """True for offerings whose pool backs off."""
    caps: Ints | None
    """The fleet price up to which each offering may be bought; None without limits."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> Offerings:
        existing = Counter(view.node.type for view in snapshot.nodes)
        rate = snapshot.limits.launches_per_min
        recent = sum(snapshot.at_s - view.node.requested_at_s < RATE_WINDOW_S for view in snapshot.nodes)
        table = OfferingTable.from_snapshot(snapshot)
        pools = {(pool.node_type, pool.zone): pool for pool in snapshot.pools}
        max_nodes = {node_type.name: node_type.max_nodes for node_type in snapshot.node_types}
        backed_off = [
            (pool := pools.get((offering.node_type.name, offering.zone))) is not None
            and pool.retry_at_s > snapshot.at_s
            for offering in table.offerings
        ]
        return cls(
            at_s=snapshot.at_s,
            table=table,
            pools=pools,
            limits=snapshot.limits,
            burn_micro_usd_h=sum(view.node.price_micro_usd_h for view in snapshot.nodes),
            left=np.array([max_nodes[name] - existing[name] for name in table.types], dtype=np.int64),
            total_left=None if snapshot.limits.max_nodes is None else snapshot.limits.max_nodes - existing.total(),
            launches_left=None if rate is None else max(0, rate - recent),
            backed_off=np.array(backed_off, dtype=np.bool_),
            caps=_caps(table, snapshot.limits),
        )

    def copy(self) -> Offerings:
        return replace(self, left=self.left.copy())

    @property
    def offerings(self) -> tuple[Offering, ...]:
        return self.table.offerings

    def offerings_for(self, shape: Shape) -> list[tuple[Offering, int]]:
        return self.table.offerings_for(shape)

    def could_hold(self, shape: Shape, count: int) -> bool:
        """Returns True if an empty fleet with all pools in stock could hold `count` members."""
        max_nodes = {o.node_type.name: o.node_type.max_nodes * fit for o, fit in self.offerings_for(shape)}
        return sum(max_nodes.values()) >= count

    def purchasable(self, purchase: Purchase = _NOTHING) -> Ints:
        """Returns, for each offering, how many nodes could still be bought after `purchase`."""
        left = self.left[self.table.type_of]
        if purchase.size:
            taken = np.zeros_like(self.left)
            for name, nodes in purchase.of_type.items():
                taken[self.table.types[name]] = nodes
            left -= taken[self.table.type_of]
        if self.total_left is not None:
            left = np.minimum(left, self.total_left - purchase.size)
        if self.caps is not None:
            spare = self.caps - self.burn_micro_usd_h - purchase.price_micro_usd_h
            left = np.minimum(left, spare // np.maximum(1, self.table.price))
        left[self.backed_off] = 0
        return np.maximum(0, left)

    def members_to_buy(self, shape: Shape) -> int:
        """Returns how many members of this shape would fit on all nodes that can be bought. Counts each node type only
        in the zone in which most members would fit.
        """
        best = np.zeros_like(self.left)
        np.maximum.at(best, self.table.type_of, self.purchasable() * self.table.members(shape))
        return int(best.sum())

    def nodes_left(self, node_type: str) -> int:
        return int(self.left[self.table.types[node_type]])

    def refusal(self, offering: Offering) -> Refusal | None:
        """Returns the reason why a node of this offering cannot be bought now. Returns None if it can be bought."""
        if (retry_at_s := self.retry_at_s(offering)) > self.at_s:
            why = self.pools[(offering.node_type.name, offering.zone)].reason
            return "stock", f"backs off until {utc(retry_at_s)}" + (f": {why}" if why else "")
        if self.nodes_left(offering.node_type.name) <= 0:
            return "capacity", f"all {offering.node_type.max_nodes} that max_nodes allows exist"
        if self.total_left is not None and self.total_left <= 0:
            return "capacity", f"all {self.limits.max_nodes} nodes that max_workers allows exist"
        if self.caps is not None and self.burn_micro_usd_h + offering.price_micro_usd_h > (
            cap := int(self.caps[offering.row])
        ):
            kind = "hard" if cap == self.limits.hard_micro_usd_h else "soft"
            after = format_usd(self.burn_micro_usd_h + offering.price_micro_usd_h)
            return "budget", f"the fleet would cost {after}/h; the {kind} limit is {format_usd(cap)}/h"
        if self.launches_left is not None and self.launches_left <= 0:
            return "rate", f"{self.limits.launches_per_min} nodes were launched within a minute"
        return None

    def buy(self, offering: Offering) -> None:
        self.left[self.table.types[offering.node_type.name]] -= 1
        self.total_left = None if self.total_left is None else self.total_left - 1
        self.burn_micro_usd_h += offering.price_micro_usd_h
        if self.launches_left is not None:
            self.launches_left -= 1

    def cancel(self, offering: Offering) -> None:
        """Undoes one `buy` of this offering."""
        self.left[self.table.types[offering.node_type.name]] += 1
        self.total_left = None if self.total_left is None else self.total_left + 1
        self.burn_micro_usd_h -= offering.price_micro_usd_h
        if self.launches_left is not None:
            self.launches_left += 1

    def retry_at_s(self, offering: Offering) -> float:
        pool = self.pools.get((offering.node_type.name, offering.zone))
        return pool.retry_at_s if pool else 0.0

    def describe_limits(self) -> str:
        """Returns a text with the price of the fleet and the limits on this price. The text is empty if there are no
        limits.
        """
        soft, hard = self.limits.soft_micro_usd_h, self.limits.hard_micro_usd_h
        words = [f"above {format_usd(soft)}/h only spot is bought"] if soft is not None else []
        words += [f"above {format_usd(hard)}/h nothing is bought"] if hard is not None else []
        return f"the fleet costs {format_usd(self.burn_micro_usd_h)}/h, and {', '.join(words)}" if words else ""


def _caps(table: OfferingTable, limits: Limits) -> Ints | None:
    """Returns the fleet price up to which each offering may be bought: the hard limit for spot, the soft limit for
    on-demand; None without limits.
    """
    if limits.soft_micro_usd_h is None and limits.hard_micro_usd_h is None:
        return None
    hard = _NO_CAP if limits.hard_micro_usd_h is None else limits.hard_micro_usd_h
    soft = hard if limits.soft_micro_usd_h is None else min(limits.soft_micro_usd_h, hard)
    return np.where(table.is_spot, hard, soft)


def _offers(snapshot: Snapshot) -> list[Offering]:
    """Returns the offerings in the order of node types and their zones."""
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
