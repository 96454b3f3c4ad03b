"""The spec with which a user requests a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.specs.rollout import MetricName, RolloutKind
from raytide.registry.rollout.ab_test import AbSpec
from raytide.registry.rollout.canary import CanarySpec


class ShadowSpec(Config):
    """A shadow rollout: the challenger gets copies of requests. Users never get the challenger's answers."""

    percent: float = Field(default=10.0, gt=0, le=100)
    """The share of the champion's requests that are copied."""


class AbTestSpec(Config):
    """A fixed split of users between two revisions. The split lasts until somebody ends the rollout."""

    percent: float = Field(default=50.0, gt=0, lt=100)
    """The challenger's share of users."""
    metric: MetricName | None = None
    """The metric whose means are compared; by default the shares of thumbs up."""
    test: AbSpec = AbSpec(effect=0.05)
    """The test to run; `effect` is in units of the metric."""

    @model_validator(mode="before")
    @classmethod
    def _effect(cls, fields: object) -> object:
        if isinstance(fields, Mapping) and fields.get("metric") is not None and "test" not in fields:
            raise ValueError("a metric needs test: {effect: the size of a difference that matters}")
        return fields


class RolloutSpec(Config):
    """The options of `raytide serve --canary`, `--shadow` or `--ab`. Exactly one of the three kinds is given."""

    canary: CanarySpec | None = None
    shadow: ShadowSpec | None = None
    ab: AbTestSpec | None = None
    ready_within_s: bounds.Seconds = 900.0
    """The seconds within which a replica of the challenger must answer."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(each is not None for each in (self.canary, self.shadow, self.ab)) != 1:
            raise ValueError("give one of canary, shadow and ab")
        return self

    @property
    def kind(self) -> RolloutKind:
        return "canary" if self.canary is not None else "shadow" if self.shadow is not None else "ab"


class NewRollout(Config):
    """A request for a rollout: the challenger's spec, the kind of rollout with its options, and the reason."""

    spec: dict[str, Any]
    rollout: RolloutSpec
    why: bounds.Word = ""

    def serve_spec(self, team: str) -> ServeSpec:
        return ServeSpec.parse({"team": team, **self.spec}, where="serve")
