"""The price of copying data to nodes. It depends on where the data is, on the price per gigabyte between places, and on
the data that each member reads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated

from pydantic import Field

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.money import MICRO
from raytide.core.objects.node import NodeType

Place = Annotated[str, Field(min_length=1, max_length=200)]


class DataInput(Config):
    """Data that each member of a gang, or each replica, reads on its node."""

    url: bounds.Location
    gb: float = Field(ge=0, le=10_000_000)
    """10^9 bytes that one member reads."""


class TransferPrice(Config):
    """The price of copying a gigabyte from one place to another."""

    source: Place = Field(alias="from")
    target: Place = Field(alias="to")
    usd_per_gb: float = Field(ge=0, le=1000)


class TransferSection(Config):
    """The section `metadata.raytide.transfer`: where data is, and the prices between places. A place is a zone, a
    region (a zone without its last letter) or the name of a provider."""

    data: dict[bounds.Location, Annotated[tuple[Place, ...], Field(min_length=1)]] = Field(max_length=1000)
    """The places of the data below each path or URL: those of the bucket and of its copies. The longest matching path
    counts.
    """
    prices: tuple[TransferPrice, ...] = Field(default=(), max_length=10_000)
    """The prices between places. The first entry that matches both places counts; within one place nothing is paid."""
    other_usd_per_gb: float = Field(ge=0, le=1000)
    """The price between places that `prices` does not name."""
    stay_h: float = Field(default=4.0, gt=0, le=10_000)
    """The hours of work over which the price of a node's data is spread; after a reclaim the next node reads them
    again.
    """

    def places_of(self, url: str) -> tuple[str, ...]:
        """Returns the places where the data at `url` is. Returns an empty tuple if this is unknown."""
        return max(
            ((prefix, places) for prefix, places in self.data.items() if _is_below(url, prefix)),
            key=lambda item: len(item[0]),
            default=("", ()),
        )[1]

    def usd_per_gb(self, url: str, node_type: NodeType, zone: str) -> tuple[float, str]:
        """Returns the lowest price in dollars of copying a gigabyte of the data to a node of this type and zone, and
        the place that has this price. Returns (0.0, "") if it is not known where the data is stored.
        """
        places = self.places_of(url)
        return min(((self._between(place, node_type, zone), place) for place in places), default=(0.0, ""))

    def micro_usd_h(
        self, inputs: Iterable[DataInput], node_type: NodeType, zone: str, reclaims_per_h: float = 0.0
    ) -> float:
        """Returns the transfer cost of one member's data, in micro-dollars per hour on a node of this type and zone.
        The cost of one read is spread over `stay_h` hours. Repeated reads after reclaims are included.
        """
        usd = sum(each.gb * self.usd_per_gb(each.url, node_type, zone)[0] for each in inputs)
        return usd * MICRO * (1.0 / self.stay_h + reclaims_per_h)

    def describe(self, inputs: Iterable[DataInput], node_type: NodeType, zone: str) -> str:
        """Returns a text that lists the transfers with a price. The text is empty if all transfers are free."""
        priced = [(each, *self.usd_per_gb(each.url, node_type, zone)) for each in inputs]
        return ", ".join(
            f"{each.gb:g} GB of {each.url} from {place} at ${usd:g} a GB"
            for each, usd, place in priced
            if usd * each.gb
        )

    def _between(self, place: str, node_type: NodeType, zone: str) -> float:
        targets = (zone, region(zone), node_type.provider)
        if place in targets:
            return 0.0
        sources = (place, region(place))
        found = (each.usd_per_gb for each in self.prices if each.source in sources and each.target in targets)
        return next(found, self.other_usd_per_gb)


@lru_cache(maxsize=4096)
def region(zone: str) -> str:
    """Returns the region of a zone: us-west-2 for us-west-2a, us-central1 for us-central1-b."""
    return re.sub("-?[a-z]$", "", zone)


def _is_below(url: str, prefix: str) -> bool:
    """Returns whether a path or URL equals `prefix` or is below it."""
    return url == prefix.rstrip("/") or url.startswith(prefix.rstrip("/") + "/")
