"""Observes the provider, Ray, Serve and drivers once per tick. If a source fails, its value is None and its error is
kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import httpx

from raytide.actors.gang.placement_groups import GroupKey, PlacementGroupInfo, PlacementGroups
from raytide.actors.serving.ray_serve.control import ServeControl
from raytide.autoscaler.nodes.utilization import MeterReader
from raytide.autoscaler.providers.base import Machine, Notice, Provider
from raytide.autoscaler.ray_gcs import GcsReader, RayNode
from raytide.control.drivers.ray_jobs import RayJobs
from raytide.core.logs import logger
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.node import NodeMeasurement, Use
from raytide.core.objects.snapshot import Demand
from raytide.core.specs.rollout import endpoint_of
from raytide.core.telemetry.targets import Target
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus

T = TypeVar("T")

log = logger(__name__)

_SHOWN_S = 60.0
"""The longest age of replicas that are shown, in seconds."""


@dataclass(frozen=True, slots=True)
class ClusterObservation:
    machines: tuple[Machine, ...] | None
    notices: tuple[Notice, ...]
    ray_nodes: tuple[RayNode, ...] | None
    demand: tuple[Demand, ...]
    groups: Mapping[GroupKey, PlacementGroupInfo] | None
    drivers: Mapping[DriverKey, DriverStatus] | None
    loads: Mapping[str, EndpointLoad]
    serve_answers: bool = True
    """False if Ray Serve did not answer: the load is unknown then, but replicas may still run."""
    errors: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Messages of the provider for operators; they are not failures of the tick."""
    api_answers: bool = False
    """True if drivers can reach the API."""
    silent_s: Mapping[str, float] | None = None
    """The silence of each gang's driver in seconds, by job; None while drivers cannot reach the API."""
    prices: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Current prices by node type and zone in micro-dollars an hour; the configured price applies to others."""
    use: Mapping[str, Use] = field(default_factory=dict)
    """The last measured utilization of each node."""
    measured: Mapping[str, NodeMeasurement] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    """Node ids by Ray's name of the machine, where id and name differ, from the provider's last answer."""
    targets: tuple[Target, ...] = ()
    """The metrics pages of nodes and replicas."""


class ApiProbe:
    """Checks whether the API answers. While it does not answer, drivers cannot send heartbeats. A missing heartbeat
    then does not show that the driver is dead.
    """

    def __init__(self, api_url: str) -> None:
        self._http = httpx.Client(base_url=api_url, timeout=1.0, trust_env=False)  # a tick waits for it

    def answers(self) -> bool:
        """Returns True if the API answers, else raises the error of the request."""
        self._http.get("/health").raise_for_status()
        return True


@dataclass(frozen=True, slots=True)
class Sources:
    """The controller's connections to everything outside it. Tests use fakes."""

    provider: Provider
    gcs: GcsReader
    groups: PlacementGroups
    drivers: RayJobs
    serve: ServeControl
    api: ApiProbe
    meters: MeterReader


def observe(
    sources: Sources,
    *,
    endpoints: tuple[str, ...],
    with_drivers: bool,
    with_gangs: bool,
    names: Mapping[str, str] | None = None,
) -> ClusterObservation:
    """Queries every source once. If a source fails, `errors` names the source. The value of a failed source is None, or
    empty if an empty value does no harm. A failure is never taken as proof that something is gone.

    `names` are the node names of the last observation. They are used if the provider does not answer.
    """
    errors: list[str] = []

    def query(what: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # sources may raise anything; the tick continues
            log.warning("source failed", extra={"source": what, "error": str(error)})
            errors.append(f"{what}: {error}")
            return None

    machines = query("provider", sources.provider.machines)
    ray_nodes, demand = query("ray", sources.gcs.nodes), query("ray demand", sources.gcs.demand)
    loads = query("Ray Serve", partial(sources.serve.loads, endpoints)) if endpoints else {}
    known = (names or {}) if machines is None else ray_names(machines)
    return ClusterObservation(
        machines=machines,
        notices=query("provider notices", sources.provider.notices) or (),
        ray_nodes=None if demand is None else with_node_ids(ray_nodes, known),  # one is useless without the other
        demand=demand or (),
        groups=query("placement groups", sources.groups.list),
        drivers=query("drivers", sources.drivers.statuses) if with_drivers else {},
        loads=loads or {},
        serve_answers=loads is not None,
        api_answers=with_gangs and bool(query("API", sources.api.answers)),
        prices=query("provider prices", sources.provider.prices) or {},
        use=sources.meters.last_readings(),
        measured=sources.meters.measured(),
        names=known,
        targets=tuple(_targets(machines or (), sources.meters, known, loads or {})),
        problems=query("provider problems", sources.provider.problems) or (),
        errors=tuple(errors),
    )


class LastReplicas:
    """The replicas in the last report of Ray Serve. The replicas keep serving while Ray Serve does not answer. They are
    therefore shown for another minute."""

    def __init__(self) -> None:
        self._at_s = -math.inf
        self._loads: Mapping[str, EndpointLoad] = {}
        self._pages: tuple[Target, ...] = ()

    def shown(self, observed: ClusterObservation, at_s: float) -> ClusterObservation:
        """Returns the observation. If Ray Serve does not answer, the last known loads and metrics pages are added to
        the observation."""
        if observed.serve_answers:
            self._at_s, self._loads = at_s, observed.loads
            self._pages = tuple(target for target in observed.targets if target.job == "raytide-replica")
            return observed
        if at_s - self._at_s > _SHOWN_S:
            return observed
        return replace(observed, loads=self._loads, targets=(*observed.targets, *self._pages))


def at_controller_time(observed: ClusterObservation, wall_ahead_s: float) -> ClusterObservation:
    """Returns the observation with the timestamps of other processes converted from wall-clock time to the controller's
    clock."""
    if not wall_ahead_s:
        return observed
    loads = {
        name: replace(
            load,
            at_s=load.at_s - wall_ahead_s,
            replicas=tuple(replace(each, at_s=each.at_s - wall_ahead_s) for each in load.replicas),
        )
        for name, load in observed.loads.items()
    }
    notices = tuple(replace(notice, deadline_s=notice.deadline_s - wall_ahead_s) for notice in observed.notices)
    return replace(observed, loads=loads, notices=notices)


def _targets(
    machines: Iterable[Machine],
    meters: MeterReader,
    names: Mapping[str, str],
    loads: Mapping[str, EndpointLoad],
) -> Iterator[Target]:
    """Yields the metrics pages of Ray's agents, of exporters, and of replicas."""
    for ray_id, address in sorted(meters.agents().items()):
        yield Target("raytide-node", address, labels={"node": names.get(ray_id, ray_id)})
    for machine in machines:
        if machine.ended_at_s is None and (exporter := meters.exporter_of(machine)):
            yield Target("raytide-gpu", exporter, labels={"node": machine.node_id})
    for name, load in loads.items():
        for replica, address in load.pages.items():
            if address:
                yield Target("raytide-replica", address, labels={"endpoint": endpoint_of(name), "replica": replica})


def ray_names(machines: Iterable[Machine]) -> dict[str, str]:
    """Returns a mapping from Ray's name of a machine to raytide's node id. The mapping has only the machines for which
    the name and the id differ.
    """
    return {machine.ray_id: machine.node_id for machine in machines if machine.ray_id}


def with_node_ids(ray_nodes: tuple[RayNode, ...] | None, names: Mapping[str, str]) -> tuple[RayNode, ...] | None:
    """Returns Ray's nodes with raytide's node ids in place of Ray's names."""
    if ray_nodes is None or not names:
        return ray_nodes
    return tuple(replace(node, node_id=names.get(node.node_id, node.node_id)) for node in ray_nodes)
