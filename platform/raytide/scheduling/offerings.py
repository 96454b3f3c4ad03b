"""All that is on offer in one table, so that what suits a shape is found in a few array operations.

Rows are offers, in the order of node types and of their zones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import CapacityType as Kind
from raytide.core.objects.node import NodeType, Resources, labels_match, round_up_gpu_share

_EPS = 1e-9

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_Labels = tuple[tuple[str, str], ...]
_Key = tuple[tuple[tuple[str, float], ...], _Labels]


@dataclass(frozen=True, slots=True)
class Offering:
    """A pool: nodes of one type in one zone."""

    row: int
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


class OfferingTable:
    """Never changes: copies of a market share it."""

    def __init__(self, offers: Sequence[Offering]) -> None:
        self.offers = tuple(offers)
        self.types = {name: at for at, name in enumerate(dict.fromkeys(offer.node_type.name for offer in offers))}
        self.type_of: Ints = np.array([self.types[offer.node_type.name] for offer in offers], dtype=np.int64)
        self.price: Ints = np.array([offer.price_micro_usd_h for offer in offers], dtype=np.int64)
        self.cost: Floats = np.array([offer.cost_micro_usd_h for offer in offers], dtype=np.float64)
        self.deaths_per_h: Floats = np.array([offer.deaths_per_h for offer in offers], dtype=np.float64)
        self.is_spot: Mask = np.array([offer.node_type.market is Kind.SPOT for offer in offers], dtype=np.bool_)
        self.columns = {
            name: at for at, name in enumerate(sorted({name for o in offers for name in o.node_type.resources}))
        }
        totals = [self.vector(offer.node_type.resources) for offer in offers]
        self.totals_PR: Floats = np.array(totals).reshape(len(offers), len(self.columns))
        self._members: dict[_Key, Ints] = {}
        self._carrying: dict[_Labels, Mask] = {}
        self._in_menu: dict[frozenset[str] | None, Mask] = {}

    def members(self, shape: Shape) -> Ints:
        """How many members of this shape a node of each offer would hold; none where it lacks a label."""
        key = tuple(shape.resources.items()), tuple(shape.labels.items())
        if (found := self._members.get(key)) is None:
            need = {name: amount for name, amount in round_up_gpu_share(shape.resources).items() if amount > 0}
            found = np.zeros(len(self.offers), dtype=np.int64)
            if need and need.keys() <= self.columns.keys():
                used = [self.columns[name] for name in need]
                copies = (self.totals_PR[:, used] + _EPS) // np.array(list(need.values()))
                found = np.where(self.carrying(shape.labels), copies.min(axis=1), 0.0).astype(np.int64)
            self._members[key] = found
        return found

    def carrying(self, selector: Mapping[str, str]) -> Mask:
        """Whether the nodes of each offer carry the labels that are asked for."""
        key = tuple(selector.items())
        if (found := self._carrying.get(key)) is None:
            found = np.array([labels_match(selector, offer.labels) for offer in self.offers], dtype=np.bool_)
            self._carrying[key] = found
        return found

    def in_menu(self, menu: frozenset[str] | None) -> Mask:
        """Whether the type of each offer is one of these; all are when there is no menu."""
        if (found := self._in_menu.get(menu)) is None:
            found = np.array([menu is None or o.node_type.name in menu for o in self.offers], dtype=np.bool_)
            self._in_menu[menu] = found
        return found

    def vector(self, amounts: Resources) -> Floats:
        """By column, without what no node type has."""
        vector = np.zeros(len(self.columns))
        for name, amount in amounts.items():
            if (at := self.columns.get(name)) is not None:
                vector[at] = amount
        return vector

    def can_ever_hold(self, amounts: Resources) -> Mask:
        """Whether an empty node of each offer has so much."""
        if any(amount > 0 and name not in self.columns for name, amount in amounts.items()):
            return np.zeros(len(self.offers), dtype=np.bool_)
        enough = self.totals_PR + _EPS >= self.vector(amounts)
        return np.asarray(enough.all(axis=1))
