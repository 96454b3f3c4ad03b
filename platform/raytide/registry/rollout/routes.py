"""An endpoint's route as gateways know it: the application that serves it, and its rollout if it has one.

A stable hash of the user chooses a request's revision, in shares that only move forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b

from pydantic import Field, model_validator

from raytide.core.config import Config
from raytide.core.specs.rollout import Rollout, RolloutState, Serving
from raytide.registry.rollout.spec import RolloutSpec

SLOTS = 10_000
"""The slots that units are hashed into; a share of traffic is a number of them."""
GROUPS = 100
"""The groups of slots by which an A/B test measures its variance. Each arm has slots in all groups."""


class TrafficSplit(Config):
    """The split between an endpoint's champion and its challenger, as gateways know it."""

    endpoint: str
    champion: int = Field(ge=1)
    """The revision that answers everybody else."""
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
        """Returns the revision that answers this unit: a user, or an API key.

        A unit that the challenger answers stays with it while `percent` rises.
        """
        return self.challenger if self._slot(unit) < self.percent * SLOTS / 100 else self.champion

    def is_shadowed(self, request_id: str) -> bool:
        """Returns whether a request to the champion is also sent to the challenger."""
        return slot_of(request_id, f"{self._salt}/shadow") < self.shadow_percent * SLOTS / 100

    def group_of(self, unit: str) -> int:
        """Returns the group of a unit's statistics."""
        return self._slot(unit) % GROUPS

    def _slot(self, unit: str) -> int:
        return slot_of(unit, self._salt)

    @property
    def _salt(self) -> str:
        """Differs between rollouts, so that it is not always the same users who get new revisions first."""
        return f"{self.endpoint}/{self.challenger}"


def slot_of(unit: str, salt: str) -> int:
    """Returns a slot that is uniform over units, the same in every process, and unrelated between salts."""
    digest = blake2b(unit.encode(errors="surrogatepass"), digest_size=8, key=salt.encode()[-64:]).digest()
    return int.from_bytes(digest, "big") % SLOTS


class RolloutRoute(Config):
    """A rollout that runs."""

    number: int = Field(ge=1)
    challenger: str
    """The challenger's application."""
    split: TrafficSplit
    by_key: bool = False
    """Requests that name no user are split by their API key, and not one by one."""


class EndpointRoute(Config):
    application: str
    revision: int = Field(ge=0)
    rollout: RolloutRoute | None = None


def routes(serving: Mapping[str, Serving], rollouts: Iterable[Rollout]) -> dict[str, EndpointRoute]:
    """Returns the routes by endpoint. A revision that was just promoted serves already."""
    found = dict(serving)
    running: dict[str, RolloutRoute] = {}
    for rollout in rollouts:
        now = found.get(rollout.name)
        if rollout.state is RolloutState.PROMOTED and now is not None and now.revision == rollout.champion:
            promoted = replace(now, application=rollout.challenger_application, revision=rollout.challenger)
            found[rollout.name] = promoted
        if rollout.state is RolloutState.RUNNING:
            running[rollout.name] = _route(rollout)
    return {
        name: EndpointRoute(application=each.application, revision=each.revision, rollout=running.get(name))
        for name, each in found.items()
    }


def _route(rollout: Rollout) -> RolloutRoute:
    spec = RolloutSpec.model_validate(rollout.plan)
    split = TrafficSplit(
        endpoint=rollout.name,
        champion=rollout.champion,
        challenger=rollout.challenger,
        percent=rollout.percent,
        shadow_percent=0.0 if spec.shadow is None else spec.shadow.percent,
    )
    challenger = rollout.challenger_application
    return RolloutRoute(number=rollout.number, challenger=challenger, split=split, by_key=spec.ab is not None)
