"""A fake Ray that counts resources. It knows on which node each replica and task of a live cluster runs, and which of
them wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raytide.actors.gang.placement_groups import GroupKey, PlacementGroupInfo
from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad
from raytide.core.objects.gang import Lease
from raytide.core.objects.node import Node, Resources, fits, labels_match, minus, plus
from raytide.core.objects.snapshot import Demand, Snapshot
from raytide.queue.lifecycle.leases import wanted_groups
from raytide.scheduling.replicas import SERVING_STATES, is_replica, replica_selector


@dataclass(slots=True, eq=False)
class _Work:
    """A member of a replica, or a task without a lease. It stays on its node."""

    resources: Resources
    selector: Mapping[str, str]
    endpoint: str = ""
    node_id: str = ""
    """The node on which it runs; "" while it waits for one."""


class LiveRay:
    """Simulates Ray for a forecast that starts from a live cluster.

    `move` applies changes and places waiting replicas and tasks. Leases get their placement groups at once.
    """

    def __init__(self, seen: Snapshot) -> None:
        self._seen = seen
        self._types = {node_type.name: node_type for node_type in seen.node_types}
        self._views = {view.node.id: view for view in seen.nodes}
        self._nodes: dict[str, Node] = {}
        self._leases = seen.leases
        self._others: dict[str, Resources] = {}
        self._size = {view.endpoint.name: view.endpoint.spec.members for view in seen.endpoints}
        """The number of members of each replica, by endpoint."""
        self._work = [*_replicas(seen), *_tasks(seen)]
        for view in seen.nodes:  # other usage stays
            rest = minus(minus(view.total, view.available), self._used(view.node))
            self._others[view.node.id] = {name: amount for name, amount in rest.items() if amount > 0}

    def move(
        self, nodes: Iterable[Node], leases: Iterable[Lease], endpoints: Iterable[Endpoint], draining: Collection[str]
    ) -> None:
        """Applies the given nodes, leases and endpoints. Nothing new starts on draining nodes."""
        self._nodes, self._leases = {node.id: node for node in nodes}, tuple(leases)
        for work in self._work:
            work.node_id = work.node_id if work.node_id in self._nodes else ""
        for endpoint in endpoints:
            self._publish(endpoint, draining)
        open_nodes = [node for node in self._nodes.values() if node.id not in draining]
        for together in self._waiting():
            self._place(together, open_nodes)

    def _waiting(self) -> Iterator[list[_Work]]:
        """Yields waiting work in units that are placed whole: single pieces of work, or all missing members of a
        replica, replicas with missing members before new ones.
        """
        members: defaultdict[str, list[_Work]] = defaultdict(list)
        for work in self._work:
            if not work.node_id and self._size.get(work.endpoint, 1) > 1:
                members[work.endpoint].append(work)
            elif not work.node_id:
                yield [work]
        for name, unplaced in members.items():
            while unplaced:
                count = len(unplaced) % self._size[name] or self._size[name]
                yield unplaced[:count]
                unplaced = unplaced[count:]

    def _place(self, together: Sequence[_Work], nodes: Sequence[Node]) -> None:
        """Places all of this work on nodes, or none of it."""
        for work in together:
            work.node_id = next((node.id for node in nodes if self._suits(work, node)), "")
        if not all(work.node_id for work in together):
            for work in together:
                work.node_id = ""

    def total(self, node: Node) -> Resources:
        return self._views[node.id].total if node.id in self._views else self._types[node.type].resources

    def available(self, node: Node) -> Resources:
        return minus(self.total(node), self._used(node))

    def is_empty(self, node: Node) -> bool:
        return not any(self._used(node).values())

    def groups(self) -> dict[GroupKey, PlacementGroupInfo]:
        """Returns the placement groups that the leases need, except the groups on nodes that no longer exist. All
        returned groups are ready.
        """
        known = {
            GroupKey(lease.id, member.index, member.incarnation): member.placement_group_id
            for lease in self._leases
            for member in lease.members
        }
        ray_node_ids = {node.ray_node_id for node in self._nodes.values()}
        wanted = wanted_groups(self._leases).values()
        return {
            w.key: PlacementGroupInfo(w.key, "ready", known[w.key] or w.key.name)
            for w in wanted
            if w.ray_node_id in ray_node_ids
        }

    def demand(self) -> tuple[Demand, ...]:
        waiting = (Demand(work.resources, work.selector) for work in self._work if not work.node_id)
        return (*waiting, *(demand for demand in self._seen.demand if demand.is_standing))

    def loads(self, now_s: float) -> dict[str, EndpointLoad]:
        """Returns the last known load of each endpoint, spread over the replicas that exist now.

        Reports keep the age that they had in the snapshot, so a fresh report stays fresh.
        """
        return {
            view.endpoint.name: self._load(view.endpoint.name, view.load, now_s - self._seen.at_s)
            for view in self._seen.endpoints
            if view.load is not None
        }

    def _load(self, name: str, load: EndpointLoad, later_s: float) -> EndpointLoad:
        at = [self._nodes[work.node_id].ray_node_id for work in self._work if work.endpoint == name and work.node_id]
        ready, traffic = len(at) // self._size[name], load.traffic
        if traffic is not None and ready > load.ready:
            traffic = replace(traffic, ttft_s=None)  # it was that of fewer replicas
        return replace(
            load,
            at_s=load.at_s + later_s,
            ready=ready,
            replica_nodes=tuple(at),
            moving=(),
            replicas=_spread(load.replicas, at[:ready], later_s),
            traffic=traffic,
        )

    def _publish(self, endpoint: Endpoint, draining: Collection[str]) -> None:
        """Starts missing replicas; replicas on draining nodes do not count as present.

        Ends surplus replicas, and those on draining nodes once all others are placed.
        """
        replicas = [work for work in self._work if work.endpoint == endpoint.name]
        staying = [work for work in replicas if work.node_id not in draining]
        spec = endpoint.spec
        target = endpoint.target_replicas * spec.members if endpoint.state in SERVING_STATES else 0
        self._work += [_Work(spec.resources, replica_selector(spec), spec.name) for _ in range(target - len(staying))]
        is_seated = sum(bool(work.node_id) for work in staying) >= target
        leaving = [work for work in replicas if work.node_id in draining] if is_seated else []
        ended = {id(work) for work in [*staying[target:], *leaving]}
        self._work = [work for work in self._work if id(work) not in ended]

    def _suits(self, work: _Work, node: Node) -> bool:
        view = self._views.get(node.id)  # an old node's type may have left the configuration
        labels = view.labels if view is not None else self._types[node.type].all_labels(node.zone)
        return labels_match(work.selector, labels) and fits(work.resources, self.available(node))

    def _used(self, node: Node) -> Resources:
        used = self._others.get(node.id, {})
        for work in self._work:
            if work.node_id == node.id:
                used = plus(used, work.resources)
        for group in wanted_groups(self._leases).values():
            if node.ray_node_id and group.ray_node_id == node.ray_node_id:
                used = plus(used, group.resources)
        return used


def _spread(replicas: Sequence[ReplicaLoad], nodes: Sequence[str], later_s: float) -> tuple[ReplicaLoad, ...]:
    """Returns reports with the same load spread evenly over replicas on these nodes."""
    if not replicas or not nodes:
        return ()
    count = len(nodes)
    share = ReplicaLoad(
        id="",
        at_s=min(replica.at_s for replica in replicas) + later_s,
        running=sum(replica.running for replica in replicas) / count,
        waiting=sum(replica.waiting for replica in replicas) / count,
        kv_use=sum(replica.kv_use for replica in replicas) / count,
    )
    return tuple(replace(share, id=str(number), node=node) for number, node in enumerate(nodes))


def _replicas(seen: Snapshot) -> Iterator[_Work]:
    at = {view.node.ray_node_id: view.node.id for view in seen.nodes if view.node.ray_node_id}
    for view in seen.endpoints:
        spec = view.endpoint.spec
        for ray_id in view.load.replica_nodes if view.load else ():
            if ray_id in at:
                yield _Work(spec.resources, replica_selector(spec), spec.name, at[ray_id])


def _tasks(seen: Snapshot) -> Iterator[_Work]:
    for task in seen.demand:
        if not is_replica(task) and not task.is_standing:
            yield from (_Work(task.resources, task.labels) for _ in range(task.count))
