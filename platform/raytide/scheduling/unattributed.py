"""What Ray counts as taken and nobody is known to hold: seats that were just left, replicas that just found room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property, partial

from raytide.core.objects.gang import MemberState
from raytide.core.objects.node import NodeState, Resources, add, fits, labels_match, minus, plus
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.scheduling.diagnosis import copies_that_fit
from raytide.scheduling.replicas import is_replica_of

LAG_S = 3.0
"""So long after a seat was given away Ray may still count it as taken, or Serve not know yet who took it."""

_COUNTED = (MemberState.FORMING, MemberState.READY, MemberState.LEAVING)


class UnattributedUsage:
    """Of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def vacated(self, served: EndpointView, starting: int) -> list[tuple[str, Resources]]:
        """The seats that are being left for its replicas, or were left just now: nodes, and how much. Those that the
        replicas that start may have taken are left out."""
        need, found = served.endpoint.spec.resources, []
        gone: Resources = {}
        for node_id, seat, is_hidden in self._given.get(served.endpoint.name, ()):
            if is_hidden and copies_that_fit(need, gone) < starting:
                gone = plus(gone, seat)
            else:
                found.append((node_id, seat))
        return found

    @cached_property
    def _given(self) -> dict[str, list[tuple[str, Resources, bool]]]:
        """By endpoint, the seats, and whether each is left and still counted as taken."""
        nodes = {view.node.id: view for view in self._snapshot.nodes}
        left: dict[str, Resources] = {}
        found: dict[str, list[tuple[str, Resources, bool]]] = {}
        for lease in self._snapshot.leases:
            need = lease.shape.resources
            for member in lease.members:
                node_id = member.node_id
                if not member.given_to or node_id not in nodes:
                    continue
                if member.is_parked:
                    unknown = left[node_id] if node_id in left else self.unknown(nodes[node_id])
                    is_hidden = fits(need, unknown)
                    left[node_id] = minus(unknown, need) if is_hidden else unknown
                    if not is_hidden:
                        continue
                found.setdefault(member.given_to, []).append((node_id, need, member.is_parked))
        return found

    def starting(self, served: EndpointView, missing: int) -> int:
        """How many of the replicas that are on no node have room all the same: their process starts, and until it has
        nobody tells on which node. One that Ray still queues has none."""
        spec = served.endpoint.spec
        queued = sum(d.count for d in self._snapshot.demand if is_replica_of(d, spec.name))
        if missing <= queued:
            return 0
        found = 0
        for view in self._strange:
            if found >= missing - queued:
                break
            found += self.room_on(view, served)
        return min(missing - queued, found)

    def room_on(self, view: NodeView, served: EndpointView) -> int:
        """For how many of its replicas something is taken there that nobody is known to hold."""
        spec = served.endpoint.spec
        is_taken = view.node.state is NodeState.READY and fits(spec.resources, minus(view.total, view.available))
        return (
            copies_that_fit(spec.resources, self.unknown(view))
            if is_taken and labels_match(spec.labels, view.labels)
            else 0
        )

    @cached_property
    def _strange(self) -> list[NodeView]:
        """Ready nodes on which more is taken than is known of."""
        return [view for view in self._snapshot.nodes if view.node.state is NodeState.READY and self._is_strange(view)]

    def _is_strange(self, view: NodeView) -> bool:
        """Whether `unknown` says more than nothing."""
        known, free = self._known[view.node.id], view.available
        return any(amount - known.get(name, 0.0) - free.get(name, 0.0) > 0 for name, amount in view.total.items())

    def unknown(self, view: NodeView) -> Resources:
        """What is taken there beyond that; less than nothing where Ray does not show yet what is known."""
        return minus(minus(view.total, self._known[view.node.id]), view.available)

    @cached_property
    def _known(self) -> Mapping[str, Mapping[str, float]]:
        """What members and replicas are known to hold of each node."""
        known: defaultdict[str, defaultdict[str, float]] = defaultdict(partial(defaultdict, float))
        for lease in self._snapshot.leases:
            for member in lease.members:
                if member.state in _COUNTED:
                    add(known[member.node_id], lease.shape.resources)
        names = {view.node.ray_node_id: view.node.id for view in self._snapshot.nodes if view.node.ray_node_id}
        for served in self._snapshot.endpoints:
            for ray_id in served.load.replica_nodes if served.load else ():
                if ray_id in names:
                    add(known[names[ray_id]], served.endpoint.spec.resources)
        return known
