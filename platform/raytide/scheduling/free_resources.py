"""The free resources of nodes. Ray shows the resources of members only some time after they were placed."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.core.objects.gang import Lease, Member, MemberState, Shape
from raytide.core.objects.node import Resources, fits, minus, round_up_gpu_share
from raytide.core.objects.snapshot import NodeView


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
