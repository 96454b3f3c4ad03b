"""The life of a lease, as a pure function of its nodes and its placement groups.

A gang never starts with too few members: no member is usable until the placement groups of enough members are ready.
If they are not ready in time, all groups of the gang are removed. Members that are lost later are replaced one by
one, while the others continue. `wanted_groups` is the only interface to Ray: it returns the placement groups that
should exist now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from raytide.actors.gang.placement_groups import GroupKey, PlacementGroupInfo, WantedGroup
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState
from raytide.core.objects.node import Node, NodeState
from raytide.core.objects.plan import Grow, Preempt, Shrink
from raytide.scheduling.unattributed import LAG_S

_WITH_GROUP = frozenset({MemberState.FORMING, MemberState.READY, MemberState.LEAVING})


def advance(
    lease: Lease, nodes: Mapping[str, Node], groups: Mapping[GroupKey, PlacementGroupInfo] | None, now_s: float
) -> Lease:
    """Returns the lease's next state. `epoch` is increased only by changes that the lease's holder must react to.

    `groups` is None while Ray does not answer. No conclusion is then drawn about groups, and the time limit for forming
    the gang starts anew.
    """
    if lease.state is LeaseState.RELEASED:
        return lease
    if groups is None:
        groups = {}
        lease = replace(lease, forming_since_s=None if lease.forming_since_s is None else now_s)
    members = [_follow_node(member, nodes.get(member.node_id), now_s) for member in lease.members]
    if groups:
        members = [_follow_group(member, groups.get(_key(lease, member)), now_s) for member in members]
    settled = _activate(_request_groups(_with_members(lease, members), nodes, now_s), groups)
    after = _time_out(_with_reason(lease, settled), now_s)
    return (
        after
        if after is lease or _visible_state(after) == _visible_state(lease)
        else replace(after, epoch=lease.epoch + 1)
    )


def assign(lease: Lease, nodes: Mapping[int, str]) -> Lease:
    """Returns the lease after the Assign actions of a plan. Members that already have a node keep it.

    `nodes` maps member indices to node ids.
    """
    members = tuple(
        replace(m, state=MemberState.ASSIGNED, node_id=nodes[m.index])
        if m.index in nodes and m.state is MemberState.WAITING
        else m
        for m in lease.members
    )
    return replace(lease, members=members)


def unassign(lease: Lease, index: int) -> Lease:
    """Returns the lease after the planner's Unassign: the member gives up its node. A member whose placement group is
    already requested keeps its node.
    """
    return _with(lease, index, MemberState.ASSIGNED, _vacate)


def apply_action(lease: Lease, action: Shrink | Preempt | Grow, now_s: float) -> Lease:
    """Returns the lease after a decision of the queue. After a Shrink or Preempt, the affected members yield and are
    parked later. After a Grow, those of the listed members that are parked look for nodes.
    """
    match action:
        case Shrink(members=members):
            return _yield_members(lease, frozenset(members), action, now_s)
        case Preempt():
            return _yield_members(lease, frozenset(range(len(lease.members))), action, now_s)
        case Grow(members=members):
            back = tuple(_vacate(m) if m.index in members and m.is_parked else m for m in lease.members)
            return replace(lease, members=back)


def acknowledge_release(lease: Lease, settled: str, now_s: float) -> Lease:
    """Returns the lease after its holder has reported that nothing runs on the leaving members. The leaving members are
    freed at once.

    Yielding members are parked. Members whose node is leaving the fleet look for another node. `settled` is the
    version of the lease to which the holder's report refers.
    """
    if settled != lease.version or not any(member.state is MemberState.LEAVING for member in lease.members):
        return lease
    members = tuple(_leave_node(m, now_s) if m.state is MemberState.LEAVING else m for m in lease.members)
    return _with_reason(lease, replace(lease, members=members, epoch=lease.epoch + 1))


def _yield_members(lease: Lease, yielding: frozenset[int], action: Shrink | Preempt, now_s: float) -> Lease:
    changed = tuple(_yielding(m, action, now_s) if m.index in yielding else m for m in lease.members)
    return lease if changed == lease.members else replace(lease, members=changed, epoch=lease.epoch + 1)


def _with(lease: Lease, index: int, state: MemberState, change: Callable[[Member], Member]) -> Lease:
    members = tuple(change(m) if m.index == index and m.state is state else m for m in lease.members)
    return replace(lease, members=members)


def release(lease: Lease, reason: str) -> Lease:
    """Returns the lease in its ended state. None of the lease's placement groups is wanted any more."""
    if lease.state is LeaseState.RELEASED:
        return lease
    return replace(lease, state=LeaseState.RELEASED, epoch=lease.epoch + 1, forming_since_s=None, reason=reason)


def wanted_groups(leases: Iterable[Lease]) -> dict[GroupKey, WantedGroup]:
    """Returns the placement groups that should exist now. The caller removes all other groups that raytide created."""
    return {
        key: WantedGroup(key, member.ray_node_id, lease.shape.resources)
        for lease in leases
        if lease.state is not LeaseState.RELEASED
        for member in lease.members
        if member.state in _WITH_GROUP
        for key in [_key(lease, member)]
    }


def _with_members(lease: Lease, members: Iterable[Member]) -> Lease:
    """Returns the lease with these members; the same object if they are unchanged, as they are on most ticks."""
    changed = tuple(members)
    return lease if changed == lease.members else replace(lease, members=changed)


def _key(lease: Lease, member: Member) -> GroupKey:
    return GroupKey(lease.id, member.index, member.incarnation)


def _vacate(member: Member) -> Member:
    """Returns the member without a node. Its group, if any, has the old incarnation's name and is no longer wanted."""
    return Member(member.index, incarnation=member.incarnation + 1)


def _park(member: Member, now_s: float) -> Member:
    """Returns the member as parked. It remembers the node that it yielded until Ray shows the node's slot as free."""
    parked = replace(_vacate(member), state=MemberState.PARKED, leaves_at_s=now_s)
    return replace(parked, given_to=member.given_to, node_id=member.node_id if member.given_to else "")


def _yielding(member: Member, action: Shrink | Preempt, now_s: float) -> Member:
    """Returns the yielding member, usable for a while longer. A member that is not usable yet is parked at once."""
    if member.is_parked or member.gives_way:
        return member
    member = replace(member, given_to=", ".join(action.by) if isinstance(action, Shrink) else "")
    if not member.is_usable:
        return _park(member, now_s)
    sooner_s = min(action.leaves_at_s, member.leaves_at_s or action.leaves_at_s)
    return replace(member, state=MemberState.LEAVING, leaves_at_s=sooner_s, gives_way=True)


def _follow_node(member: Member, node: Node | None, now_s: float) -> Member:
    if not member.has_node:
        is_free = member.is_parked and now_s - (member.leaves_at_s or 0.0) >= LAG_S
        return replace(member, node_id="") if is_free and member.node_id else member
    if member.gives_way and member.leaves_at_s is not None and now_s >= member.leaves_at_s:
        return _park(member, now_s)
    if node is None or node.state in (NodeState.TERMINATING, NodeState.GONE):
        return _leave_node(member, now_s)
    if member.state in _WITH_GROUP and node.ray_node_id != member.ray_node_id:
        return _leave_node(member, now_s)  # its raylet is another one than that of the group
    if member.gives_way:
        return member
    if node.state is NodeState.DRAINING:
        is_over = node.drain_deadline_s is not None and now_s >= node.drain_deadline_s
        if not member.is_usable or is_over:
            return _vacate(member)
        return replace(member, state=MemberState.LEAVING, leaves_at_s=node.drain_deadline_s)
    if member.state is MemberState.LEAVING and node.state is NodeState.READY:
        return replace(member, state=MemberState.READY, leaves_at_s=None)
    return member


def _leave_node(member: Member, now_s: float) -> Member:
    return _park(member, now_s) if member.gives_way else _vacate(member)


def _follow_group(member: Member, group: PlacementGroupInfo | None, now_s: float) -> Member:
    """Makes a member whose group Ray lost look for a node again. A group that is missing in Ray's list is kept, because
    the list may be stale.
    """
    if member.state not in _WITH_GROUP or group is None:
        return member
    is_lost = group.state == "removed"
    if member.is_usable:
        is_lost = group.state != "ready" or group.placement_group_id != member.placement_group_id
    return _leave_node(member, now_s) if is_lost else member


def _request_groups(lease: Lease, nodes: Mapping[str, Node], now_s: float) -> Lease:
    """Requests groups once enough members have a ready node."""
    able = {m.index for m in lease.members if _is_on_ready_node(m, nodes)}
    holding = sum(m.state in _WITH_GROUP for m in lease.members)
    if not able or holding + len(able) < lease.shape.at_least:
        return lease
    members = tuple(_start(m, nodes[m.node_id]) if m.index in able else m for m in lease.members)
    return replace(
        lease, members=members, forming_since_s=now_s if lease.forming_since_s is None else lease.forming_since_s
    )


def _is_on_ready_node(member: Member, nodes: Mapping[str, Node]) -> bool:
    return member.state is MemberState.ASSIGNED and nodes[member.node_id].state is NodeState.READY


def _start(member: Member, node: Node) -> Member:
    return replace(member, state=MemberState.FORMING, ray_node_id=node.ray_node_id, address=node.address)


def _activate(lease: Lease, groups: Mapping[GroupKey, PlacementGroupInfo]) -> Lease:
    """Makes members usable, all at once the first time, and sets the state of the lease."""
    is_enough = sum(m.is_usable or _is_ready(lease, m, groups) for m in lease.members) >= lease.shape.at_least
    if is_enough:
        lease = _with_members(lease, (_finish(lease, m, groups) for m in lease.members))
    is_forming = any(m.state is MemberState.FORMING for m in lease.members)
    state = LeaseState.ACTIVE if is_enough else LeaseState.FORMING if is_forming else LeaseState.WAITING
    forming_since_s = lease.forming_since_s if is_forming else None
    if (state, forming_since_s) == (lease.state, lease.forming_since_s):
        return lease
    return replace(lease, state=state, forming_since_s=forming_since_s)


def _time_out(lease: Lease, now_s: float) -> Lease:
    """Gives up on forming in time: all groups that are forming are removed, and their members look for nodes again."""
    if lease.forming_since_s is None or now_s - lease.forming_since_s < lease.form_timeout_s:
        return lease
    where = ", ".join(sorted({m.node_id for m in lease.members if m.state is MemberState.FORMING}))
    return replace(
        lease,
        state=LeaseState.WAITING if lease.state is LeaseState.FORMING else lease.state,
        members=tuple(_vacate(m) if m.state is MemberState.FORMING else m for m in lease.members),
        forming_since_s=None,
        reason=f"no room in Ray on {where} within {lease.form_timeout_s:g} s; its members look for other nodes",
    )


def _finish(lease: Lease, member: Member, groups: Mapping[GroupKey, PlacementGroupInfo]) -> Member:
    if member.state is not MemberState.FORMING or not _is_ready(lease, member, groups):
        return member
    group = groups[_key(lease, member)]
    return replace(member, state=MemberState.READY, placement_group_id=group.placement_group_id)


def _is_ready(lease: Lease, member: Member, groups: Mapping[GroupKey, PlacementGroupInfo]) -> bool:
    if member.state is not MemberState.FORMING:
        return False
    group = groups.get(_key(lease, member))
    return group is not None and group.state == "ready"


def _with_reason(before: Lease, after: Lease) -> Lease:
    """Returns the lease with its reason set if the state or the number of usable members changed."""
    if after is before:
        return after
    usable, total = len(after.usable), len(after.members)
    if (after.state, usable) == (before.state, len(before.usable)):
        return after
    needed = f", {after.shape.at_least} needed" if usable < after.shape.at_least else ""
    making = "; placement groups are being made" if after.state is LeaseState.FORMING else ""
    return replace(after, reason=f"{usable} of {total} members are usable{needed}{making}")


def _visible_state(lease: Lease) -> tuple[object, ...]:
    """Returns the parts of a lease to which its holder reacts."""
    usable = tuple((m.index, m.incarnation, m.state, m.leaves_at_s) for m in lease.usable)
    return lease.state is LeaseState.ACTIVE, usable
