"""Room that somebody asked Ray to have (`ray.autoscaler.sdk.request_resources`), whether or not work waits for it.

What work without a lease uses counts towards it, as Ray counts it; what jobs and endpoints hold does not. It buys under
the same cap as that work, and the nodes that hold it do not idle out.
"""

from __future__ import annotations

from raytide.autoscaler.provisioning.plan_builder import Assignment, PlanBuilder
from raytide.autoscaler.provisioning.provisioner import UNMANAGED, UnmanagedPlacement, add_unmanaged_wait
from raytide.core.objects.gang import Shape
from raytide.core.objects.node import Resources, minus, plus
from raytide.scheduling.diagnosis import Unschedulable, describe_amounts
from raytide.scheduling.placement import Slot
from raytide.scheduling.state import SchedulingState, Tenant
from raytide.scheduling.unattributed import UnattributedUsage


def provision_requested(draft: PlanBuilder, unleased: UnmanagedPlacement) -> None:
    """After the work that waits in Ray: `unleased` says how that was seated."""
    asked = [d for d in draft.snapshot.demand if d.is_standing and any(amount > 0 for amount in d.resources.values())]
    if not asked:
        return
    work, room, bought = _work(draft, unleased), draft.state.copy(), unleased.bought
    room.pending, bought_here = None, set[str]()
    for node_id, resources in work.items():
        room.release(node_id, resources)
    for demand in asked:
        shape = Shape.computed(demand.resources, demand.labels)
        what = f"room for {demand.count} x ({describe_amounts(shape)}), which request_resources asks for,"
        left, first = max(0, unleased.max_nodes - bought), room.next_node
        found = room.place(shape, demand.count, at_least=0, menu=unleased.node_types, max_new=left, subject=what)
        assert not isinstance(found, Unschedulable)
        for number in range(first, room.next_node):
            bought_here.add(draft.state.buy_offer(room.bought[f"node-{number}"]).node_id)
        bought += room.next_node - first
        seats = tuple(seat for seat in found if not seat.is_new or seat.node_id in bought_here)
        for seat in seats:
            _take(draft.state, seat, shape, unleased, work)
        draft.assign(Assignment(UNMANAGED, f"{what} is not there", seats))
        if rest := demand.count - len(found):
            add_unmanaged_wait(draft, shape, rest, what, is_capped=bought >= unleased.max_nodes)


def _work(draft: PlanBuilder, unleased: UnmanagedPlacement) -> dict[str, Resources]:
    """What work without a lease has of each node: what it uses, and what it was just promised."""
    unseen, work = UnattributedUsage(draft.snapshot), dict[str, Resources]()
    for view in draft.snapshot.nodes:
        if view.node.id in draft.state.rows:
            work[view.node.id] = {name: amount for name, amount in unseen.unknown(view).items() if amount > 0}
    for node_id, resources in unleased.slots:
        work[node_id] = plus(work.get(node_id, {}), resources)
    return {node_id: resources for node_id, resources in work.items() if resources}


def _take(
    room: SchedulingState, seat: Slot, shape: Shape, unleased: UnmanagedPlacement, work: dict[str, Resources]
) -> None:
    """What the work does not have already is kept free."""
    if seat.is_new:
        room.tenants[seat.node_id].append(Tenant(shape, frozenset(t.name for t in unleased.node_types)))
    has, need = work.get(seat.node_id, {}), shape.resources
    both = {name: min(amount, has.get(name, 0.0)) for name, amount in need.items()}
    work[seat.node_id] = minus(has, both)
    room.reserve(seat.node_id, minus(need, both))
