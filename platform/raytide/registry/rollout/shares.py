"""The replicas that the two revisions of a rollout may have: together at most one more than the endpoint alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.specs.rollout import Rollout
from raytide.registry.rollout.spec import RolloutSpec


def with_shares(
    endpoints: Mapping[str, Endpoint], rollouts: Iterable[Rollout], loads: Mapping[str, EndpointLoad]
) -> dict[str, Endpoint]:
    """Returns the endpoints, those of live rollouts with bounds for their replicas by their share of traffic. An
    application that lost keeps what it has until it drains.

    Within them the number follows the load as always. A revision gets room as the other one gives it up: the champion's
    maximum falls as the challenger's replicas become ready, and the challenger's rises as the champion's end.
    """
    found = dict(endpoints)
    for rollout in rollouts:
        champion = endpoints.get(rollout.champion_application)
        challenger = endpoints.get(rollout.challenger_application)
        if not rollout.state.is_live and (loser := endpoints.get(rollout.loser)) is not None:
            found[loser.name] = _bounded(loser, 1, max(1, loser.target_replicas), min(1, loser.spec.replicas.min))
        if not rollout.state.is_live or champion is None or challenger is None:
            continue
        load = loads.get(challenger.name)
        ready = 0 if load is None else load.ready
        share = _share(rollout)
        both = max(champion.spec.replicas.max, challenger.spec.replicas.max) + 1
        most = min(math.ceil(challenger.spec.replicas.max * share), both - champion.target_replicas)
        found[challenger.name] = _bounded(challenger, math.ceil(challenger.spec.replicas.min * share), max(1, most), 1)
        least = math.ceil(champion.spec.replicas.min * (1.0 - min(1.0, rollout.percent / 100.0)))
        most = min(champion.spec.replicas.max, both - ready)
        found[champion.name] = _bounded(champion, least, max(1, most), min(1, champion.spec.replicas.min))
    return found


def _share(rollout: Rollout) -> float:
    """Returns the challenger's share of requests, copies included."""
    shadow = RolloutSpec.model_validate(rollout.plan).shadow
    return min(1.0, (rollout.percent if shadow is None else shadow.percent) / 100.0)


def _bounded(endpoint: Endpoint, least: int, most: int, never_below: int) -> Endpoint:
    bounds = {"min": min(max(least, never_below), most), "max": most}
    replicas = endpoint.spec.replicas.model_copy(update=bounds)
    return replace(endpoint, spec=endpoint.spec.model_copy(update={"replicas": replicas}))
