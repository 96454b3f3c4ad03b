"""The tenants of each node: replicas of endpoints, members of gangs, and other work in Ray."""

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
from raytide.scheduling.throughput import at_least_as_fast_as

_EPS = 1e-6


@dataclass(frozen=True)
class Tenants:
    """The replicas and the members of gangs on one node."""

    view: NodeView
    replicas: tuple[EndpointView, ...] = ()
    """The endpoint of each replica, by its last report."""
    members: tuple[tuple[Lease, Member], ...] = ()
    paces: Mapping[str, Throughputs] = field(default_factory=dict)
    """Keyed by job."""

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
        """The tenants as text for messages."""
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
        """The shapes that the tenants would need on another node, one for each tenant. A member of a gang keeps its
        accelerator and the label that all members of the gang share.
        """
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
        """A key made of the tenants' total resources and the labels of each tenant. If two nodes have equal keys, their
        tenants fit the same offerings.
        """
        labels = (tuple(sorted(shape.labels.items())) for shape in self.shapes)
        return (*sorted(self.resources.items()), *labels)

    @cached_property
    def accounts_for_all_usage(self) -> bool:
        """True if the known tenants explain all resource usage that Ray reports for the node."""
        explained: Resources = {}
        for shape in self._shapes:
            explained = plus(explained, shape.resources)
        free = self.view.available
        return all(
            total - free.get(name, 0.0) <= explained.get(name, 0.0) + _EPS
            for name, total in self.view.stable_total.items()
        )

    def hosts_only(self, lease: Lease) -> bool:
        """Returns whether the node is used only by members of the gang with this lease."""
        return self.leases == {lease.id} and not self.replicas and self.accounts_for_all_usage

    def _where_as_fast(self, shape: Shape, paces: Throughputs | None) -> Shape:
        """Restricts the shape to node types that are at least as fast for this work as the present type, because only
        then can hourly prices be compared.
        """
        if not paces:
            return shape
        types = at_least_as_fast_as(self.view.node.type, paces)
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
    """The endpoint of each replica, by Ray's node id."""
    members: dict[str, list[tuple[Lease, Member]]] = field(default_factory=dict)
    """Members by node id."""
    paces: Mapping[str, Throughputs] = field(default_factory=dict)
    """Keyed by job."""
    _tenants: dict[str, Tenants] = field(default_factory=dict)
    """Cache by node id."""
    _prices: dict[str, float] = field(default_factory=dict)
    """Cache by lease id."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> NodeOccupancy:
        occupancy = cls(
            jobs={job.id: job for job in snapshot.jobs},
            leases={lease.id: lease for lease in snapshot.leases},
            views={view.node.id: view for view in snapshot.nodes},
            in_ray={view.node.ray_node_id: view for view in snapshot.nodes if view.node.ray_node_id},
            endpoints={view.endpoint.name: view for view in snapshot.endpoints},
            paces=snapshot.paces,
        )
        for endpoint in snapshot.endpoints:
            for ray_node_id in endpoint.load.replica_nodes if endpoint.load else ():
                occupancy.replicas_by_ray_node.setdefault(ray_node_id, []).append(endpoint)
        occupancy.replicas_by_ray_node.pop("", None)
        for lease in snapshot.leases:
            for member in lease.members:
                if member.has_node:
                    occupancy.members.setdefault(member.node_id, []).append((lease, member))
        return occupancy

    def tenants_of(self, view: NodeView) -> Tenants:
        node = view.node
        if (found := self._tenants.get(node.id)) is None:
            replicas, members = self.replicas_by_ray_node.get(node.ray_node_id, ()), self.members.get(node.id, ())
            found = self._tenants[node.id] = Tenants(view, tuple(replicas), tuple(members), self.paces)
        return found

    def price_of(self, lease: Lease) -> float:
        """Returns the price of the gang with this lease in micro-dollars an hour. The gang pays its share of each
        node's price.
        """
        if lease.id not in self._prices:
            views = [self.views[m.node_id] for m in lease.members if m.has_node and m.node_id in self.views]
            shares = [dominant_share(lease.shape.resources, view.total) for view in views]
            prices = [view.node.price_micro_usd_h for view in views]
            self._prices[lease.id] = sum(map(mul, prices, shares))
        return self._prices[lease.id]


def _with_node_labels(shape: Shape, view: NodeView) -> Shape:
    keys = [shape.together] if shape.together else []
    keys += [ACCELERATOR_LABEL] if shape.resources.get("GPU") else []
    labels = {key: view.labels[key] for key in keys if key in view.labels}
    return shape.model_copy(update={"labels": {**shape.labels, **labels}, "together": ""}) if labels else shape
