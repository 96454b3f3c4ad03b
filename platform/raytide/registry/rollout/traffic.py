"""Chooses the revision for a request by a stable hash of the user. As the challenger's share grows, users move only
from the champion to the challenger.
"""

from __future__ import annotations

from hashlib import blake2b

from pydantic import Field, model_validator

from raytide.core.config import Config

SLOTS = 10_000
"""The number of slots into which units are hashed; a share of traffic is a number of slots."""
GROUPS = 100
"""The number of groups of slots from which an A/B test measures its variance. Each arm has slots in all groups."""


class TrafficSplit(Config):
    """The split of an endpoint's traffic between champion and challenger. Gateways receive it with the endpoint's
    route.
    """

    endpoint: str
    champion: int = Field(ge=1)
    """The revision that answers all other units."""
    challenger: int = Field(ge=1)
    percent: float = Field(default=0.0, ge=0, le=100)
    """The share of units whose requests the challenger answers."""
    shadow_percent: float = Field(default=0.0, ge=0, le=100)
    """The share of the champion's requests that are also sent to the challenger, whose answers no user sees."""

    @model_validator(mode="after")
    def _two(self) -> TrafficSplit:
        if self.champion == self.challenger:
            raise ValueError("champion and challenger are the same revision")
        return self

    def revision_of(self, unit: str) -> int:
        """Returns the revision that answers the requests of this unit, which is a user, an API key or a single request.

        A unit that the challenger answers stays with the challenger while `percent` rises.
        """
        return self.challenger if self._slot(unit) < self.percent * SLOTS / 100 else self.champion

    def is_shadowed(self, request_id: str) -> bool:
        """Returns whether the challenger gets a copy of this request. The champion answers the request in either
        case.
        """
        return slot_of(request_id, f"{self._salt}/shadow") < self.shadow_percent * SLOTS / 100

    def group_of(self, unit: str) -> int:
        """Returns the group of users to which a unit belongs. Observations are summed by group."""
        return self._slot(unit) % GROUPS

    def _slot(self, unit: str) -> int:
        return slot_of(unit, self._salt)

    @property
    def _salt(self) -> str:
        """The salt of the hash. It differs between rollouts, so that different users are the first to get new
        revisions.
        """
        return f"{self.endpoint}/{self.challenger}"


def slot_of(unit: str, salt: str) -> int:
    """Returns the slot into which a unit is hashed.

    Slots are uniform over units, the same in every process, and independent for different salts.
    """
    digest = blake2b(unit.encode(errors="surrogatepass"), digest_size=8, key=salt.encode()[-64:]).digest()
    return int.from_bytes(digest, "big") % SLOTS
