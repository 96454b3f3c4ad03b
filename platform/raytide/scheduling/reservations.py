"""Reserves nodes for replicas that do not fit. Otherwise smaller jobs could starve a replica by taking every slot that
becomes free.

The reserved nodes are those that lack the fewest resources for the replica. They take no new work. As their running
work ends, the missing resources become free. Replicas of other endpoints may still use these nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from raytide.core.objects.gang import Shape
from raytide.core.objects.node import Resources, round_up_gpu_share
from raytide.core.objects.snapshot import EndpointView, Snapshot
from raytide.scheduling.node_table import NodeTable, Rows
from raytide.scheduling.offerings import Floats
from raytide.scheduling.replicas import replica_shape
from raytide.scheduling.state import SchedulingState

Reservation = tuple[tuple[str, Resources], ...]
"""The reserved nodes, each with its reserved resources: those that are free there and that the replica needs."""

_EPS = 1e-6


def with_reservations(snapshot: Snapshot, room: SchedulingState) -> Snapshot:
    """Returns the snapshot with nodes reserved for the first unplaced replica of each endpoint. An endpoint gets no
    reserved nodes if its own policy chooses the nodes.
    """
    lacking = [view for view in snapshot.endpoints if missing_members(room, view) and view.pools is None]
    if not lacking:
        return snapshot
    fleet, reserved = (
        _Fleet.from_snapshot(snapshot, room, {name for view in lacking for name in _need(view)}),
        dict[str, Reservation](),
    )
    for view in lacking:
        shape, count = replica_shape(view), members_at_once(view, missing_members(room, view))
        if found := fleet.reserve(shape, count, room.offerings.members_to_buy(shape)):
            reserved[view.endpoint.name] = found
    return replace(snapshot, kept=reserved)


def missing_members(room: SchedulingState, view: EndpointView) -> int:
    """Returns the number of replica members of the endpoint that fit nowhere, not even on nodes that can be bought."""
    name = view.endpoint.name
    return room.missing.get(name, 0) - len(room.replicas.get(name, ()))


def members_at_once(view: EndpointView, lacking: int) -> int:
    """Returns how many of the `lacking` members must be placed together. They either complete an incomplete replica, or
    are all members of one replica.
    """
    return lacking % view.endpoint.spec.members or view.endpoint.spec.members


def reserve(room: SchedulingState, reserved: Reservation) -> None:
    for node_id, resources in reserved:
        room.reserve(node_id, resources)


@dataclass(slots=True, eq=False)
class _Fleet:
    """The existing and starting nodes, in order."""

    ids: Sequence[str]
    node_table: NodeTable
    rows: Rows
    """The rows of the nodes in the node table."""
    free: Mapping[str, Floats]
    """The free amounts by node, for each resource."""
    most: Mapping[str, Floats]
    """The amounts by node, for each resource, that are free once all jobs have ended; replicas do not end."""

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, room: SchedulingState, names: Iterable[str]) -> _Fleet:
        views = [view for view in snapshot.nodes if view.node.id in room.rows]
        views.sort(key=lambda view: (len(view.node.id), view.node.id))
        rows = np.array([room.rows[view.node.id] for view in views], dtype=np.int64)
        free_NR = np.array([room.node_table.free_at(row) for row in rows.tolist()])
        used, free, most = _used_by_replicas(snapshot, room), dict[str, Floats](), dict[str, Floats]()
        for name in sorted(names):
            columns = room.node_table.columns({name: 1.0})
            free[name] = free_NR[:, columns[0][0]] if columns and views else np.zeros(len(views))
            future = [view.stable_total.get(name, 0.0) - used[view.node.id][name] for view in views]
            most[name] = np.array(future, dtype=np.float64)
        return cls([view.node.id for view in views], room.node_table, rows, free, most)

    def reserve(self, shape: Shape, count: int, to_buy: int) -> Reservation:
        """Reserves the nodes that lack the fewest resources for `count` members, `to_buy` of which fit on new nodes.

        Returns an empty reservation if the members could never all fit.
        """
        need = {name: amount for name, amount in round_up_gpu_share(shape.resources).items() if amount > 0}
        if not need:
            return ()
        holds = np.min([(self.most[name] + _EPS) // amount for name, amount in need.items()], axis=0)
        holds *= self.node_table.matching(shape.labels)[self.rows]
        slots: list[tuple[float, int]] = []
        for number in range(1, count + 1):
            rows = np.flatnonzero(holds >= number)
            lacking = [(number * amount - self.free[name][rows]) / amount for name, amount in need.items()]
            deficit = np.clip(np.max(lacking, axis=0), 0.0, 1.0)
            least = np.argsort(deficit, kind="stable")[:count]
            slots += zip(deficit[least].tolist(), rows[least].tolist(), strict=True)
        if len(slots) + to_buy < count:
            return ()
        chosen = Counter(row for _, row in sorted(slots)[: max(0, count - to_buy)])
        return tuple((self.ids[row], self._take(row, number, need)) for row, number in chosen.items())

    def _take(self, row: int, number: int, need: Resources) -> Resources:
        """Takes the resources of `number` members from a node: from its free resources as far as possible, from its
        future ones in full.

        Returns the resources taken from the free ones.
        """
        some = {name: min(float(self.free[name][row]), number * amount) for name, amount in need.items()}
        for name, amount in some.items():
            self.free[name][row] -= amount
            self.most[name][row] -= number * need[name]
        return {name: amount for name, amount in some.items() if amount > _EPS}


def _need(view: EndpointView) -> Resources:
    return {name: amount for name, amount in view.endpoint.spec.resources.items() if amount > 0}


def _used_by_replicas(snapshot: Snapshot, room: SchedulingState) -> Mapping[str, Mapping[str, float]]:
    """Returns the resources of each node that replicas use or will soon use."""
    used: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    ids = {view.node.ray_node_id: view.node.id for view in snapshot.nodes if view.node.ray_node_id}
    for view in snapshot.endpoints:
        hosts = view.load.replica_nodes if view.load else ()
        starting = [slot.node_id for slot in room.replicas.get(view.endpoint.name, ())]
        for node_id in [*(ids[host] for host in hosts if host in ids), *starting]:
            for name, amount in round_up_gpu_share(view.endpoint.spec.resources).items():
                used[node_id][name] += amount
    return used
