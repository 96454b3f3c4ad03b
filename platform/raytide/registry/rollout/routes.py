"""The route of an endpoint, as gateways read it: the application that serves the endpoint, and its running rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pydantic import Field

from raytide.core.config import Config
from raytide.core.specs.rollout import Rollout, RolloutState, Serving
from raytide.registry.rollout.spec import RolloutSpec
from raytide.registry.rollout.traffic import TrafficSplit


class RolloutRoute(Config):
    """A running rollout, as gateways need to know it."""

    number: int = Field(ge=1)
    challenger: str
    """The challenger's application."""
    split: TrafficSplit
    by_key: bool = False
    """True if requests that name no user are assigned by their API key; else each one is assigned on its own."""


class EndpointRoute(Config):
    application: str
    revision: int = Field(ge=0)
    rollout: RolloutRoute | None = None


def routes(serving: Mapping[str, Serving], rollouts: Iterable[Rollout]) -> dict[str, EndpointRoute]:
    """Returns the routes by endpoint name. If a challenger was just promoted, the endpoint's route already names it as
    the serving application.
    """
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
