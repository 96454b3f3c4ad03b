"""Corrections of what Ray reports, which lags behind. The free resources of nodes leave out members that Ray does not
count yet. Unattributed usage is usage that no known member or replica explains. It belongs to members that have just
left, or to replicas that have just been placed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial

from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.objects.node import NodeState, Resources, add, fits, labels_match, minus, plus, round_up_gpu_share
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.scheduling.diagnosis import copies_that_fit
from raytide.scheduling.replicas import is_replica_of

LAG_S = 3.0
"""The seconds after a member left in which Ray may still count it, and Serve may not know which replica took its
slot."""

_COUNTED = (MemberState.FORMING, MemberState.READY, MemberState.LEAVING)


class UnattributedUsage:
    """The unexplained resource usage in one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def yielded_slots(self, endpoint_view: EndpointView, starting: int) -> list[tuple[str, Resources]]:
        """Returns the slots that members of gangs yield, or have just yielded, to the endpoint's replicas. A slot is a
        pair: a node's id, and resources on this node.

        Slots that the `starting` replicas may already have taken are left out.
        """
        need, found = endpoint_view.endpoint.spec.resources, []
        taken: Resources = {}
        for node_id, resources, is_hidden in self._yielded.get(endpoint_view.endpoint.name, ()):
            if is_hidden and copies_that_fit(need, taken) < starting:
                taken = plus(taken, resources)
            else:
                found.append((node_id, resources))
        return found

    @cached_property
    def _yielded(self) -> dict[str, list[tuple[str, Resources, bool]]]:
        """The yielded slots by endpoint: the node id, the resources, and whether the member has left but still counts
        in Ray.
        """
        nodes = {view.node.id: view for view in self._snapshot.nodes}
        remaining: dict[str, Resources] = {}
        found: dict[str, list[tuple[str, Resources, bool]]] = {}
        for lease in self._snapshot.leases:
            need = lease.shape.resources
            for member in lease.members:
                node_id = member.node_id
                if not member.given_to or node_id not in nodes:
                    continue
                if member.is_parked:
                    unattributed = remaining[node_id] if node_id in remaining else self.amount(nodes[node_id])
                    is_hidden = fits(need, unattributed)
                    remaining[node_id] = minus(unattributed, need) if is_hidden else unattributed
                    if not is_hidden:
                        continue
                found.setdefault(member.given_to, []).append((node_id, need, member.is_parked))
        return found

    def starting_replicas(self, endpoint_view: EndpointView, missing: int) -> int:
        """Returns how many of the `missing` replicas probably hold resources on a node already.

        While a replica's process starts, Ray counts its resources but does not report its node. Replicas that Ray still
        queues are not included.
        """
        spec = endpoint_view.endpoint.spec
        queued = sum(d.count for d in self._snapshot.demand if is_replica_of(d, spec.name))
        if missing <= queued:
            return 0
        found = 0
        for view in self._with_unattributed:
            if found >= missing - queued:
                break
            found += self.replicas_on(view, endpoint_view)
        return min(missing - queued, found)

    def replicas_on(self, view: NodeView, endpoint_view: EndpointView) -> int:
        """Returns how many of the endpoint's replicas could explain the unexplained usage on this node."""
        spec = endpoint_view.endpoint.spec
        is_taken = view.node.state is NodeState.READY and fits(spec.resources, minus(view.total, view.available))
        return (
            copies_that_fit(spec.resources, self.amount(view))
            if is_taken and labels_match(spec.labels, view.labels)
            else 0
        )

    @cached_property
    def _with_unattributed(self) -> list[NodeView]:
        """The ready nodes with unattributed usage."""
        return [
            view for view in self._snapshot.nodes if view.node.state is NodeState.READY and self._has_unattributed(view)
        ]

    def _has_unattributed(self, view: NodeView) -> bool:
        known, free = self._known[view.node.id], view.available
        return any(amount - known.get(name, 0.0) - free.get(name, 0.0) > 0 for name, amount in view.total.items())

    def amount(self, view: NodeView) -> Resources:
        """Returns the unattributed usage of a node: its used resources minus those that known members and replicas
        hold. An amount is negative while Ray does not yet report usage of known members or replicas.
        """
        return minus(minus(view.total, self._known[view.node.id]), view.available)

    @cached_property
    def _known(self) -> Mapping[str, Mapping[str, float]]:
        """The resources that known members and replicas hold on each node."""
        known: defaultdict[str, defaultdict[str, float]] = defaultdict(partial(defaultdict, float))
        for lease in self._snapshot.leases:
            for member in lease.members:
                if member.state in _COUNTED:
                    add(known[member.node_id], lease.shape.resources)
        names = {view.node.ray_node_id: view.node.id for view in self._snapshot.nodes if view.node.ray_node_id}
        for endpoint_view in self._snapshot.endpoints:
            for ray_id in endpoint_view.load.replica_nodes if endpoint_view.load else ():
                if ray_id in names:
                    add(known[names[ray_id]], endpoint_view.endpoint.spec.resources)
        return known


def free_resources(views: Sequence[NodeView], leases: Sequence[Lease]) -> list[Resources]:
    """Returns the free resources of each node."""
    uncounted, taken = _uncounted_members(leases), _taken_by_usable(leases)
    return [_free(view, taken.get(view.node.id), uncounted.get(view.node.id, ())) for view in views]


def _uncounted_members(leases: Sequence[Lease]) -> dict[str, list[tuple[Member, Shape]]]:
    """Returns the members by node whose placement groups Ray may not count yet."""
    found: dict[str, list[tuple[Member, Shape]]] = {}
    for lease in leases:
        for member in lease.members:
            if member.state in (MemberState.ASSIGNED, MemberState.FORMING):
                found.setdefault(member.node_id, []).append((member, lease.shape))
    return found


def _taken_by_usable(leases: Sequence[Lease]) -> dict[str, dict[str, float]]:
    """Returns the resources of usable members by node. Ray shows them a second or two after their placement groups are
    ready."""
    found: dict[str, dict[str, float]] = {}
    for lease in leases:
        need = lease.shape.resources.items()
        for member in lease.members:
            if member.is_usable:
                taken = found.setdefault(member.node_id, {})
                for name, amount in need:
                    taken[name] = taken.get(name, 0.0) + amount
    return found


def _free(view: NodeView, taken: Resources | None, uncounted: Sequence[tuple[Member, Shape]]) -> Resources:
    """Returns the free resources of a node: at most what usable members leave (`taken`), and without those of members
    whose placement group Ray does not count yet (`uncounted`).

    ASSIGNED members have no group and are subtracted. FORMING members have a group that Ray may count or not. They are
    subtracted as long as the free resources cover them: at worst this hides free resources for a second until they are
    READY, but nothing is promised twice. If the free resources do not cover them, Ray must have counted them."""
    free = view.available
    if taken and not fits(taken, minus(view.total, free)):
        free = {name: min(amount, view.total.get(name, 0.0) - taken.get(name, 0.0)) for name, amount in free.items()}
    for member, shape in uncounted:
        if member.state is MemberState.ASSIGNED:
            free = minus(free, round_up_gpu_share(shape.resources))
    for member, shape in uncounted:
        if member.state is MemberState.FORMING and fits(shape.resources, free):
            free = minus(free, round_up_gpu_share(shape.resources))
    return free
