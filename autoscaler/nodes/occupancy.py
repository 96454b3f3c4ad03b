"""Who works on each node: replicas, members of gangs, and whatever else Ray runs there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import mul

from raytide.core.objects.gang import Lease, Member, Shape
from raytide.core.objects.job import Job
from raytide.core.objects.node import ACCELERATOR_LABEL, TYPE_LABEL, Resources, dominant_share, plus, round_up_gpu_share
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot, Throughputs
from raytide.scheduling.replicas import replica_shape, replica_throughputs
from raytide.scheduling.throughput import no_slower

_EPS = 1e-6


@dataclass(frozen=True)
class Tenants:
    """Of one node."""

    view: NodeView
    replicas: tuple[EndpointView, ...] = ()
    """The endpoint of each, by the last word that was heard."""
    members: tuple[tuple[Lease, Member], ...] = ()
    paces: Mapping[str, Throughputs] = field(default_factory=dict)
    """By job."""

    def __bool__(self) -> bool:
        return bool(self.replicas or self.members)

    @property
    def price_micro_usd_h(self) -> int:
        return self.view.node.price_micro_usd_h

    @property
    def leases(self) -> frozenset[str]:
        return frozenset(lease.id for lease, _ in self.members)

    @property
    def description(self) -> str:
        """In words."""
        jobs = list(dict.fromkeys(lease.job_id for lease, _ in self.members))
        more = [f"{len(jobs) - 3} more"] if len(jobs) > 3 else []
        return ", ".join([*jobs[:3], *more]) or f"the {len(self.replicas)} replicas"

    @cached_property
    def resources(self) -> Resources:
        need: Resources = {}
        for shape in self._shapes:
            need = plus(need, round_up_gpu_share(shape.resources))
        return need

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """What each needs elsewhere. A gang keeps its accelerator, and what its members share."""
        gangs = (
            _with_node_labels(self._where_as_fast(lease.shape, self.paces.get(lease.job_id)), self.view)
            for lease, _ in self.members
        )
        return (
            *(self._where_as_fast(replica_shape(replica), replica_throughputs(replica)) for replica in self.replicas),
            *gangs,
        )

    @cached_property
    def shape_key(self) -> tuple[object, ...]:
        """What all of them need, and the labels that each asks for: alike for nodes whose occupants fit the same."""
        labels = (tuple(sorted(shape.labels.items())) for shape in self.shapes)
        return (*sorted(self.resources.items()), *labels)

    @cached_property
    def accounts_for_all_usage(self) -> bool:
        """Whether nothing else of Ray's runs there."""
        theirs: Resources = {}
        for shape in self._shapes:
            theirs = plus(theirs, shape.resources)
        free = self.view.available
        return all(
            total - free.get(name, 0.0) <= theirs.get(name, 0.0) + _EPS for name, total in self.view.countable.items()
        )

    def hosts_only(self, lease: Lease) -> bool:
        """Whether nobody else is there than members of this gang."""
        return self.leases == {lease.id} and not self.replicas and self.accounts_for_all_usage

    def _where_as_fast(self, shape: Shape, paces: Throughputs | None) -> Shape:
        """Only where its work goes no slower than here: the price of an hour says nothing else."""
        if not paces:
            return shape
        types = no_slower(self.view.node.type, paces)
        return shape.model_copy(update={"labels": {TYPE_LABEL: types, **shape.labels}})

    @property
    def _shapes(self) -> tuple[Shape, ...]:
        return (*map(replica_shape, self.replicas), *(lease.shape for lease, _ in self.members))


@dataclass(slots=True, eq=False)
class NodeOccupancy:
    jobs: Mapping[str, Job]
    leases: Mapping[str, Lease]
    views: Mapping[str, NodeView]
    in_ray: Mapping[str, NodeView]
    endpoints: Mapping[str, EndpointView]
    replicas_by_ray_node: dict[str, list[EndpointView]] = field(default_factory=dict)
    """Replicas by Ray's id of their node."""
    members: dict[str, list[tuple[Lease, Member]]] = field(default_factory=dict)
    """Members by their node."""
    paces: Mapping[str, Throughputs] = field(default_factory=dict)
    """By job."""
    _tenants: dict[str, Tenants] = field(default_factory=dict)
    """By node, as far as they were asked for."""
    _prices: dict[str, float] = field(default_factory=dict)
    """By lease, as far as they were asked for."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> NodeOccupancy:
        roster = cls(
            jobs={job.id: job for job in snapshot.jobs},
            leases={lease.id: lease for lease in snapshot.leases},
            views={view.node.id: view for view in snapshot.nodes},
            in_ray={view.node.ray_node_id: view for view in snapshot.nodes if view.node.ray_node_id},
            endpoints={view.endpoint.name: view for view in snapshot.endpoints},
            paces=snapshot.paces,
        )
        for endpoint in snapshot.endpoints:
            for ray_node_id in endpoint.load.replica_nodes if endpoint.load else ():
                roster.replicas_by_ray_node.setdefault(ray_node_id, []).append(endpoint)
        roster.replicas_by_ray_node.pop("", None)
        for lease in snapshot.leases:
            for member in lease.members:
                if member.has_node:
                    roster.members.setdefault(member.node_id, []).append((lease, member))
        return roster

    def tenants_of(self, view: NodeView) -> Tenants:
        node = view.node
        if (found := self._tenants.get(node.id)) is None:
            replicas, seats = self.replicas_by_ray_node.get(node.ray_node_id, ()), self.members.get(node.id, ())
            found = self._tenants[node.id] = Tenants(view, tuple(replicas), tuple(seats), self.paces)
        return found

    def price_of(self, lease: Lease) -> float:
        """Micro-dollars an hour of what the gang holds, by its share of each node."""
        if lease.id not in self._prices:
            views = [self.views[m.node_id] for m in lease.members if m.has_node and m.node_id in self.views]
            shares = [dominant_share(lease.shape.resources, view.total) for view in views]
            prices = [view.node.price_micro_usd_h for view in views]
            self._prices[lease.id] = sum(map(mul, prices, shares))
        return self._prices[lease.id]


def _with_node_labels(shape: Shape, view: NodeView) -> Shape:
    kept = [shape.together] if shape.together else []
    kept += [ACCELERATOR_LABEL] if shape.resources.get("GPU") else []
    labels = {key: view.labels[key] for key in kept if key in view.labels}
    return shape.model_copy(update={"labels": {**shape.labels, **labels}, "together": ""}) if labels else shape
