from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raytide.actors.gang.placement_groups import GroupKey, GroupState, PlacementGroupInfo, WantedGroup, difference
from raytide.core.objects.gang import Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.node import CapacityType, Node, NodeState
from raytide.core.objects.plan import Shrink
from raytide.queue.lifecycle.leases import (
    acknowledge_release,
    advance,
    apply_action,
    assign,
    release,
    unassign,
    wanted_groups,
)
from raytide.scheduling.unattributed import LAG_S

READY, DRAINING, GONE = NodeState.READY, NodeState.DRAINING, NodeState.GONE


def node(number: int, state: NodeState = READY, deadline_s: float | None = None) -> Node:
    return Node(
        f"node-{number}",
        "spot",
        "z",
        CapacityType.SPOT,
        1,
        state,
        0.0,
        drain_deadline_s=deadline_s,
        ray_node_id=f"ray-{number}",
        address=f"127.0.1.{number}",
    )


def nodes(*found: Node) -> dict[str, Node]:
    return {n.id: n for n in found}


def new(members: int = 2, at_least: int | None = None) -> Lease:
    shape = Shape(members=members, min_members=at_least, resources={"CPU": 1.0})
    return Lease(
        "lease-1", "job-1", shape, LeaseState.WAITING, tuple(Member(i) for i in range(members)), form_timeout_s=60.0
    )


def seated(lease: Lease) -> Lease:
    for member in lease.members:
        lease = assign(lease, {member.index: f"node-{member.index}"})
    return lease


def groups_of(lease: Lease, state: GroupState = "ready", **other: GroupState) -> dict[GroupKey, PlacementGroupInfo]:
    """Ray has done what was wanted; `m1="pending"` for a member that differs."""
    return {
        key: PlacementGroupInfo(key, other.get(f"m{key.member}", state), f"pg-{key.name}")
        for key in wanted_groups([lease])
    }


def active(members: int = 2, at_least: int | None = None) -> Lease:
    there = nodes(*(node(i) for i in range(members)))
    lease = advance(seated(new(members, at_least)), there, {}, 0.0)
    return advance(lease, there, groups_of(lease), 1.0)


def states(lease: Lease) -> list[str]:
    return [str(member.state) for member in lease.members]


def test_a_gang_forms_when_its_nodes_are_ready_and_becomes_usable_all_at_once() -> None:
    lease = advance(new(), {}, {}, 0.0)
    assert (lease.state, lease.epoch, wanted_groups([lease])) == (LeaseState.WAITING, 0, {})
    lease = advance(seated(lease), nodes(node(0), node(1, NodeState.LAUNCHING)), {}, 1.0)
    assert (lease.state, states(lease)) == (LeaseState.WAITING, ["assigned", "assigned"])
    lease = advance(lease, nodes(node(0), node(1)), {}, 2.0)
    assert (lease.state, states(lease), lease.forming_since_s) == (LeaseState.FORMING, ["forming", "forming"], 2.0)
    key = GroupKey("lease-1", 0, 0)
    assert wanted_groups([lease])[key] == WantedGroup(key, "ray-0", {"CPU": 1.0})
    half = advance(lease, nodes(node(0), node(1)), groups_of(lease, m1="pending"), 3.0)
    assert (half.state, half.usable, half.epoch) == (LeaseState.FORMING, (), 0)
    whole = advance(half, nodes(node(0), node(1)), groups_of(lease), 4.0)
    assert (whole.state, states(whole), whole.epoch, whole.forming_since_s) == (
        LeaseState.ACTIVE,
        ["ready", "ready"],
        1,
        None,
    )
    assert whole.members[1] == Member(1, MemberState.READY, "node-1", "ray-1", "127.0.1.1", "pg-raytide/lease-1/1/0")
    assert "2 of 2" in whole.reason


def test_a_gang_that_cannot_form_in_time_gives_everything_back_and_looks_elsewhere() -> None:
    there = nodes(node(0), node(1))
    lease = advance(seated(new()), there, {}, 0.0)
    stuck = groups_of(lease, m1="pending")
    assert advance(lease, there, stuck, 59.0).state is LeaseState.FORMING
    late = advance(lease, there, stuck, 60.0)
    assert (late.state, states(late), late.epoch) == (LeaseState.WAITING, ["waiting", "waiting"], 0)
    assert [m.incarnation for m in late.members] == [1, 1]
    assert "no room in Ray on node-0, node-1 within 60 s" in late.reason
    create, remove = difference(wanted_groups([late]), stuck)
    assert (create, len(remove)) == ((), 2)


def test_nothing_times_out_while_the_state_of_the_groups_is_unknown() -> None:
    there = nodes(node(0), node(1))
    lease = advance(seated(new()), there, {}, 0.0)
    silent = advance(lease, there, None, 500.0)
    assert (silent.state, states(silent), silent.epoch) == (LeaseState.FORMING, ["forming", "forming"], 0)
    assert advance(silent, there, groups_of(silent), 501.0).state is LeaseState.ACTIVE
    stuck = groups_of(silent, m1="pending")
    assert advance(silent, there, stuck, 559.0).state is LeaseState.FORMING, "its time begins when Ray answers again"
    assert advance(silent, there, stuck, 560.0).state is LeaseState.WAITING


def test_an_active_lease_outlives_the_silence_of_ray() -> None:
    lease = active()
    assert advance(lease, nodes(node(0), node(1)), None, 500.0) == lease


def test_a_member_whose_node_dies_is_filled_anew_while_the_survivors_go_on() -> None:
    lease = active(members=2, at_least=1)
    lost = advance(lease, nodes(node(0), node(1, GONE)), groups_of(lease), 5.0)
    assert (lost.state, states(lost), lost.epoch) == (LeaseState.ACTIVE, ["ready", "waiting"], lease.epoch + 1)
    assert (lost.members[1].incarnation, lost.members[1].node_id) == (1, "")
    assert set(wanted_groups([lost])) == {GroupKey("lease-1", 0, 0)}
    refilled = assign(lost, {1: "node-2"})
    there = nodes(node(0), node(2))
    refilled = advance(refilled, there, groups_of(lost), 6.0)
    assert states(refilled) == ["ready", "forming"]
    refilled = advance(refilled, there, groups_of(refilled), 7.0)
    assert (states(refilled), refilled.epoch) == (["ready", "ready"], lost.epoch + 1)


def test_below_its_minimum_a_lease_waits_and_the_survivors_keep_their_groups() -> None:
    lease = active(members=2)
    lost = advance(lease, nodes(node(0)), groups_of(lease), 5.0)
    assert (lost.state, states(lost)) == (LeaseState.WAITING, ["ready", "waiting"])
    assert set(wanted_groups([lost])) == {GroupKey("lease-1", 0, 0)}
    assert lost.reason == "1 of 2 members are usable, 2 needed"


def test_a_notice_makes_a_member_leave_at_the_deadline() -> None:
    lease = active(members=2, at_least=1)
    there = nodes(node(0), node(1, DRAINING, deadline_s=50.0))
    leaving = advance(lease, there, groups_of(lease), 10.0)
    assert (states(leaving), leaving.members[1].leaves_at_s, leaving.epoch) == (
        ["ready", "leaving"],
        50.0,
        lease.epoch + 1,
    )
    assert advance(leaving, there, groups_of(lease), 49.0) == leaving
    gone = advance(leaving, there, groups_of(lease), 50.0)
    assert (states(gone), gone.epoch) == (["ready", "waiting"], leaving.epoch + 1)
    back = advance(leaving, nodes(node(0), node(1)), groups_of(lease), 20.0)
    assert (states(back), back.members[1].leaves_at_s) == (["ready", "ready"], None)


def test_a_member_whose_node_leaves_looks_for_another_as_soon_as_its_holder_has_left_it() -> None:
    lease = active(members=2, at_least=1)
    there = nodes(node(0), node(1, DRAINING, deadline_s=50.0))
    leaving = advance(lease, there, groups_of(lease), 10.0)
    assert acknowledge_release(leaving, lease.version, 11.0) is leaving
    left = acknowledge_release(leaving, leaving.version, 11.0)
    assert (states(left), left.members[1].incarnation, left.epoch) == (["ready", "waiting"], 1, leaving.epoch + 1)


def test_a_yielding_member_is_free_as_soon_as_its_holder_has_left_it_and_no_sooner() -> None:
    shrink = Shrink("job-1", "lease-1", (1,), 40.0, "a spike", by=("chat",))
    before = active(2, 1)
    lease = apply_action(before, shrink, 10.0)
    assert [(m.state, m.given_to) for m in lease.members] == [(MemberState.READY, ""), (MemberState.LEAVING, "chat")]
    assert acknowledge_release(lease, before.version, 11.0) is lease, "what it left before it was asked is old news"
    assert acknowledge_release(lease, "lease-0@1", 11.0) is lease
    left = acknowledge_release(lease, lease.version, 12.0)
    assert (states(left), left.epoch, left.state) == (["ready", "parked"], lease.epoch + 1, LeaseState.ACTIVE)
    assert left.reason == "1 of 2 members are usable"
    assert {key.member for key in wanted_groups([left])} == {0}
    there = nodes(node(0), node(1))
    assert advance(left, there, groups_of(left), 12.5).members[1].node_id == "node-1", (
        "it may not be seen to be free yet"
    )
    later = advance(left, there, groups_of(left), 12.0 + LAG_S)
    assert (later.members[1].node_id, later.members[1].given_to, later.epoch) == ("", "chat", left.epoch)


def test_a_draining_node_never_receives_a_member() -> None:
    there = nodes(node(0), node(1, DRAINING, deadline_s=50.0))
    assert states(advance(seated(new()), there, {}, 0.0)) == ["assigned", "waiting"]


def test_a_raylet_that_came_back_as_another_one_has_lost_the_group() -> None:
    lease = active()
    there = nodes(node(0), replace(node(1), ray_node_id="ray-9"))
    assert states(advance(lease, there, groups_of(lease), 5.0)) == ["ready", "waiting"]


def test_a_group_that_ray_lost_or_made_anew_is_not_the_members_any_more() -> None:
    lease = active(at_least=1)
    there = nodes(node(0), node(1))
    for state in ("pending", "removed"):
        assert states(advance(lease, there, groups_of(lease, m1=state), 5.0)) == ["ready", "waiting"]
    other = {
        key: replace(group, placement_group_id="other") for key, group in groups_of(lease).items() if key.member == 1
    }
    assert states(advance(lease, there, other, 5.0)) == ["ready", "waiting"]
    assert advance(lease, there, {}, 5.0) == lease


def test_a_group_that_is_removed_while_it_forms_is_not_waited_for() -> None:
    there = nodes(node(0), node(1))
    lease = advance(seated(new()), there, {}, 0.0)
    after = advance(lease, there, groups_of(lease, m1="removed"), 1.0)
    assert (states(after), after.members[1].incarnation) == (["forming", "waiting"], 1)


def test_a_late_joiner_that_finds_no_room_does_not_disturb_the_others() -> None:
    lease = active(members=2, at_least=1)
    lost = advance(lease, nodes(node(0)), groups_of(lease), 5.0)
    there = nodes(node(0), node(2))
    forming = advance(assign(lost, {1: "node-2"}), there, groups_of(lost), 6.0)
    late = advance(forming, there, groups_of(forming, m1="pending"), 66.0)
    assert (late.state, states(late), late.epoch) == (LeaseState.ACTIVE, ["ready", "waiting"], forming.epoch)


def test_nothing_new_changes_nothing() -> None:
    lease = active()
    assert advance(lease, nodes(node(0), node(1)), groups_of(lease), 99.0) == lease


def test_a_released_lease_wants_nothing_and_stays_as_it_is() -> None:
    lease = active()
    over = release(lease, "job-1 succeeded")
    assert (over.state, over.epoch, wanted_groups([over])) == (LeaseState.RELEASED, lease.epoch + 1, {})
    assert release(over, "again") == over
    assert advance(over, {}, {}, 9.0) == over


def test_only_a_member_that_holds_nothing_yet_is_unassigned() -> None:
    lease = assign(new(), {0: "node-0"})
    assert assign(lease, {0: "node-5"}) == lease
    assert states(unassign(lease, 0)) == ["waiting", "waiting"]
    assert unassign(active(), 0) == active()


def test_names_of_groups_say_whose_they_are() -> None:
    key = GroupKey("lease-12", 3, 4)
    assert key.name == "raytide/lease-12/3/4"
    assert GroupKey.of_name(key.name) == key
    for foreign in (
        *("", "raytide/lease-1/0", "mine/lease-1/0/0", "raytide/lease-1/x/0"),
        *("raytide/my-run/0/0", "raytide/lease-1/\u00b2/0"),
    ):
        assert GroupKey.of_name(foreign) is None


class Life(RuleBasedStateMachine):
    """Nodes come, drain and go, Ray is slow or loses groups, the planner assigns: what must always hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lease = new(members=3, at_least=2)
        self.nodes: dict[str, Node] = {}
        self.groups: dict[GroupKey, PlacementGroupInfo] = {}
        self.count = 0
        self.now_s = 0.0

    @rule()
    def a_node_comes(self) -> None:
        self.count += 1
        found = node(self.count, NodeState.LAUNCHING)
        self.nodes[found.id] = found

    @rule(data=st.data(), state=st.sampled_from(list(NodeState)))
    def a_node_changes(self, data: st.DataObject, state: NodeState) -> None:
        if self.nodes:
            id = data.draw(st.sampled_from(sorted(self.nodes)))
            if self.nodes[id].state is not GONE:
                deadline_s = self.now_s + 30 if state is DRAINING else None
                self.nodes[id] = replace(self.nodes[id], state=state, drain_deadline_s=deadline_s)

    @rule(data=st.data())
    def the_planner_assigns(self, data: st.DataObject) -> None:
        waiting = [m.index for m in self.lease.members if m.state is MemberState.WAITING]
        able = [n.id for n in self.nodes.values() if n.state in (NodeState.LAUNCHING, READY)]
        if waiting and able:
            self.lease = assign(self.lease, {waiting[0]: data.draw(st.sampled_from(able))})

    @rule()
    def ray_is_made_to_match(self) -> None:
        create, remove = difference(wanted_groups([self.lease]), self.groups)
        for group in remove:
            self.groups[group.key] = replace(group, state="removed")
        for wanted in create:
            self.groups[wanted.key] = PlacementGroupInfo(wanted.key, "pending", f"pg-{len(self.groups)}")

    @rule(data=st.data(), state=st.sampled_from(["ready", "pending", "removed"]))
    def ray_does_something(self, data: st.DataObject, state: GroupState) -> None:
        if self.groups:
            key = data.draw(st.sampled_from(sorted(self.groups, key=str)))
            self.groups[key] = replace(self.groups[key], state=state)

    @rule(seconds=st.sampled_from([1.0, 31.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        before = self.lease
        self.lease = after = advance(before, self.nodes, self.groups, self.now_s)
        seen = [
            (x.state is LeaseState.ACTIVE, [(m.index, m.incarnation, m.state, m.leaves_at_s) for m in x.usable])
            for x in (before, after)
        ]
        assert after.epoch == before.epoch + (seen[0] != seen[1])
        assert all(b.incarnation >= a.incarnation for a, b in zip(before.members, after.members, strict=True))
        # A pass without news changes nothing more.
        assert advance(after, self.nodes, self.groups, self.now_s) == after
        for member in after.members:
            if member.state is not MemberState.WAITING:
                assert self.nodes[member.node_id].state not in (GONE, NodeState.TERMINATING)

    @invariant()
    def usable_is_all_or_nothing(self) -> None:
        usable = len(self.lease.usable)
        assert (self.lease.state is LeaseState.ACTIVE) == (usable >= self.lease.shape.at_least)

    @invariant()
    def a_member_holds_what_its_state_says(self) -> None:
        for member in self.lease.members:
            assert (member.state is MemberState.WAITING) == (member.node_id == "")
            assert member.is_usable == bool(member.placement_group_id)
            assert (member.leaves_at_s is not None) <= (member.state is MemberState.LEAVING)
        assert (self.lease.forming_since_s is not None) == any(
            m.state is MemberState.FORMING for m in self.lease.members
        )


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
