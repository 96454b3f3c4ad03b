"""One look at everything outside: provider, Ray, Serve, drivers. A source that fails is None, and is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import httpx

from raytide.actors.gang.placement_groups import GroupKey, PlacementGroupInfo, PlacementGroups
from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.autoscaler.nodes.utilization import Meters
from raytide.autoscaler.providers.base import Machine, Notice, Provider
from raytide.autoscaler.ray_gcs import GcsReader, RayNode
from raytide.control.ray_jobs import RayJobs
from raytide.core.logs import logger
from raytide.core.objects.endpoint import EndpointLoad
from raytide.core.objects.node import Use
from raytide.core.objects.snapshot import Demand
from raytide.jobs.lifecycle.jobs import DriverKey, DriverStatus

T = TypeVar("T")

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterObservation:
    machines: tuple[Machine, ...] | None
    notices: tuple[Notice, ...]
    ray_nodes: tuple[RayNode, ...] | None
    demand: tuple[Demand, ...]
    groups: Mapping[GroupKey, PlacementGroupInfo] | None
    drivers: Mapping[DriverKey, DriverStatus] | None
    loads: Mapping[str, EndpointLoad]
    errors: tuple[str, ...] = ()
    api_answers: bool = False
    """Only then can drivers make themselves heard."""
    silent_s: Mapping[str, float] | None = None
    """By gang, for how long its driver has not made itself heard; None while it cannot."""
    prices: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Present ones by node type and zone, micro-dollars an hour; of those left out the configured one holds."""
    use: Mapping[str, Use] = field(default_factory=dict)
    """What the meters of each node said last."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Our node id by what Ray calls the machine, where the two differ; from the provider's last answer."""


class ApiProbe:
    """Checks whether drivers can reach the API; their silence means nothing while they cannot."""

    def __init__(self, api_url: str) -> None:
        self._http = httpx.Client(base_url=api_url, timeout=1.0)  # a tick waits for it

    def answers(self) -> bool:
        """Returns True, or raises when the API does not answer."""
        self._http.get("/health").raise_for_status()
        return True


@dataclass(frozen=True, slots=True)
class Sources:
    """Every way in and out of the controller. Tests put fakes here."""

    provider: Provider
    gcs: GcsReader
    groups: PlacementGroups
    drivers: RayJobs
    serve: ServeControl
    api: ApiProbe
    meters: Meters


def observe(
    sources: Sources,
    *,
    endpoints: tuple[str, ...],
    with_drivers: bool,
    with_gangs: bool,
    names: Mapping[str, str] | None = None,
) -> ClusterObservation:
    """Ask everybody once. What did not answer is None (or empty where that is safe): silence proves nothing.

    `names`: those of the last look, for when the provider does not answer.
    """
    errors: list[str] = []

    def ask(what: str, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except Exception as error:  # any source may fail in any way; the loop goes on with what it has
            log.warning("source failed", extra={"source": what, "error": str(error)})
            errors.append(f"{what}: {error}")
            return None

    machines = ask("provider", sources.provider.machines)
    ray_nodes, demand = ask("ray", sources.gcs.nodes), ask("ray demand", sources.gcs.demand)
    known = (names or {}) if machines is None else ray_names(machines)
    return ClusterObservation(
        machines=machines,
        notices=ask("provider notices", sources.provider.notices) or (),
        ray_nodes=None if demand is None else named(ray_nodes, known),  # half an answer is none
        demand=demand or (),
        groups=ask("placement groups", sources.groups.list),
        drivers=ask("drivers", sources.drivers.statuses) if with_drivers else {},
        loads=(ask("Ray Serve", partial(sources.serve.loads, endpoints)) if endpoints else None) or {},
        api_answers=with_gangs and bool(ask("API", sources.api.answers)),
        prices=ask("provider prices", sources.provider.prices) or {},
        use=sources.meters.heard(),
        names=known,
        errors=tuple(errors),
    )


def at_our_time(world: ClusterObservation, wall_ahead_s: float) -> ClusterObservation:
    """The same, with what others stamped by the wall clock at the controller's own time."""
    if not wall_ahead_s:
        return world
    loads = {
        name: replace(
            load,
            at_s=load.at_s - wall_ahead_s,
            replicas=tuple(replace(each, at_s=each.at_s - wall_ahead_s) for each in load.replicas),
        )
        for name, load in world.loads.items()
    }
    notices = tuple(replace(notice, deadline_s=notice.deadline_s - wall_ahead_s) for notice in world.notices)
    return replace(world, loads=loads, notices=notices)


def ray_names(machines: Iterable[Machine]) -> dict[str, str]:
    """Our node id by what Ray calls the machine, where the two differ."""
    return {machine.ray_id: machine.node_id for machine in machines if machine.ray_id}


def named(ray_nodes: tuple[RayNode, ...] | None, names: Mapping[str, str]) -> tuple[RayNode, ...] | None:
    """Ray's nodes under raytide's ids, also where the provider let Ray call them something else."""
    if ray_nodes is None or not names:
        return ray_nodes
    return tuple(replace(node, node_id=names.get(node.node_id, node.node_id)) for node in ray_nodes)
