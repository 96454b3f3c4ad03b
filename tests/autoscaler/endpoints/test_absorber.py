"""The shock absorber: replicas without room preempt spare members of elastic trainers, which grow back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.autoscaler.world import CRASH_POINTS, Cluster

from raytide.autoscaler.endpoints.targets import set_targets
from raytide.control.reconcile.decide import decide
from raytide.core.objects.cluster_config import UnmanagedSection
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import Lease, LeaseState, Shape
from raytide.core.objects.node import CapacityType, NodeType
from raytide.core.objects.plan import Action, Grow, Launch, Scale, Shrink, Wait
from raytide.core.objects.snapshot import Demand, Limits, MarketConstraint
from raytide.core.objects.team import Team, TeamSpec
from raytide.queue.admission.scheduler import GRACE_S, SETTLE_S, admission_state, schedule
from raytide.queue.lifecycle.pending_reason import given_away_text
from raytide.scheduling.replicas import replica_selector
from raytide.scheduling.unattributed import LAG_S, UnattributedUsage

GPU4 = NodeType(name="gpu4", resources={"GPU": 4.0}, price_micro_usd_h=4_000_000, max_nodes=1, idle_timeout_s=30)
ALONE = NodeType(
    name="solo", resources={"GPU": 1.0}, labels={"solo": "yes"}, price_micro_usd_h=1, max_nodes=1, idle_timeout_s=30
)
SHARED = {"solo": "!yes"}


def one_gpu(members: int, at_least: int | None = None) -> Shape:
    return Shape(members=members, min_members=at_least, resources={"GPU": 1.0}, labels=SHARED)


def chat(most: int = 4, gpus: float = 1.0, **more: object) -> ServeSpec:
    replicas = Replicas(min=1, max=most, target_ongoing=2, downscale_delay_s=5)
    return ServeSpec(name="chat", model="/m", replicas=replicas, resources={"GPU": gpus}, **more)  # type: ignore[arg-type]


class World:
    """A fleet that cannot grow, a trainer of four that holds one node of it, and an endpoint with a node for one."""

    def __init__(self, *node_types: NodeType, spec: ServeSpec | None = None, at_least: int = 2, **job: object) -> None:
        self.c = Cluster(node_types or (GPU4, ALONE), UnmanagedSection(max_nodes=0), launch_delay_s=8.0)
        self.job = self.c.submit(one_gpu(4, at_least), **{"preemptible": True, **job})
        self.c.settle(14)
        assert self.members() == 4
        self.spec = spec or chat()
        self.c.serve(self.spec)
        self.c.settle(14)

    def lease(self) -> Lease:
        live = [lease for lease in self.c.book.leases.values() if lease.state is not LeaseState.RELEASED]
        return next(lease for lease in live if lease.job_id == self.job)

    def members(self) -> int:
        return len(self.lease().usable)

    def seated(self) -> int:
        return sum(work.endpoint == self.spec.name and bool(work.node_id) for work in self.c.ray.work)

    def load(self, ongoing: float) -> None:
        self.c.ongoing[self.spec.name] = ongoing

    def after(self, ticks: int) -> list[Action]:
        return self.c.settle(ticks)


def test_a_spike_preempts_spare_members_and_brings_them_back() -> None:
    w = World()
    assert (w.members(), w.seated()) == (4, 1)
    w.load(6.0)
    actions = w.after(1)
    (scale,) = [action for action in actions if isinstance(action, Scale)]
    (shrink,) = [action for action in actions if isinstance(action, Shrink)]
    assert (scale.replicas, shrink.members, shrink.by) == (3, (2, 3), ("chat",))
    assert shrink.reason == "2 of its 4 members yield to endpoint chat until its load falls; it continues with 2"
    assert "max_nodes" in shrink.rejected[0].reason or "held by" in shrink.rejected[0].reason
    assert w.after(4) == []
    assert (w.members(), w.seated()) == (2, 3)
    assert given_away_text(w.lease()) == "it gave 2 of 4 GPUs to endpoint chat until its load falls"
    w.after(30)
    assert (w.members(), w.seated()) == (2, 3), "it stays so while the load does"
    w.load(0.0)
    back = w.after(12)
    assert [len(action.members) for action in back if isinstance(action, Grow)] == [2]
    assert (w.members(), w.seated()) == (4, 1)
    assert given_away_text(w.lease()) == ""


def test_members_come_back_before_their_node_is_drained() -> None:
    w = World(at_least=1)
    w.load(8.0)
    w.after(6)
    w.load(0.0)
    assert not [action for action in w.after(60) if action.__class__.__name__ in ("Drain", "Terminate", "Launch")]
    assert w.members() == 4


def test_a_driver_that_says_nothing_has_its_grace() -> None:
    w = World()
    w.c.nimble = False
    w.load(6.0)
    w.after(int(GRACE_S) - 1)
    assert (w.members(), w.seated()) == (4, 1)
    w.after(4)
    assert (w.members(), w.seated()) == (2, 3)


def test_no_gang_goes_below_its_minimum_and_the_endpoint_is_told_why_it_waits() -> None:
    w = World(at_least=3)
    w.load(8.0)
    (shrink,) = [action for action in w.after(1) if isinstance(action, Shrink)]
    assert len(shrink.members) == 1
    w.after(4)
    assert (w.members(), w.seated()) == (3, 2)
    (wait,) = [a for a in w.c.tick() if isinstance(a, Wait) and a.subject == "chat" and a.constraint == "capacity"]
    assert "job-1" in wait.reason


@pytest.mark.parametrize(
    ("spec", "job"),
    [
        (chat(), {"preemptible": False}),
        (chat(priority="normal"), {"priority": "normal"}),
        (chat(priority="normal"), {"priority": "high"}),
    ],
)
def test_what_cannot_be_preempted_or_is_not_of_a_lower_class_is_left_alone(
    spec: ServeSpec, job: dict[str, object]
) -> None:
    w = World(spec=spec, **job)
    w.load(8.0)
    w.after(10)
    assert (w.members(), w.seated()) == (4, 1)


def test_a_class_takes_from_the_classes_below_it() -> None:
    w = World(spec=chat(priority="high"), priority="normal")
    w.load(8.0)
    w.after(5)
    assert (w.members(), w.seated()) == (2, 3)


def test_the_limit_turns_it_off() -> None:
    w = World()
    w.c.limits = Limits(shrink_for_serving=False)
    w.load(8.0)
    w.after(10)
    assert (w.members(), w.seated()) == (4, 1)


def test_a_replica_of_two_gpus_preempts_two_members_on_one_node() -> None:
    two = GPU4.model_copy(update={"name": "gpu2", "resources": {"GPU": 2.0}, "max_nodes": 2})
    lonely = ALONE.model_copy(update={"resources": {"GPU": 2.0}})
    c = Cluster((two, lonely), UnmanagedSection(max_nodes=0))
    job = c.submit(Shape(members=4, min_members=1, resources={"GPU": 1.0}, labels=SHARED), preemptible=True)
    c.settle(14)
    c.serve(chat(gpus=2.0))
    c.settle(14)
    (lease,) = c.book.leases.values()
    c.ongoing["chat"] = 4.0
    (shrink,) = [action for action in c.settle(1) if isinstance(action, Shrink)]
    assert shrink.job_id == job
    assert len({lease.members[index].node_id for index in shrink.members}) == 1
    assert len(shrink.members) == 2
    c.settle(5)
    assert sum(work.endpoint == "chat" and bool(work.node_id) for work in c.ray.work) == 2


@pytest.mark.parametrize(("seat", "each", "asked", "seats"), [(4.0, 1.0, 8.0, 1), (1.0, 0.5, 12.0, 2)])
def test_room_left_over_by_a_member_serves_the_next_replica(seat: float, each: float, asked: float, seats: int) -> None:
    c = Cluster((GPU4.model_copy(update={"max_nodes": 4}), ALONE), UnmanagedSection(max_nodes=0))
    size = Shape(members=int(16 / seat), min_members=1, resources={"GPU": seat}, labels=SHARED)
    c.submit(size, preemptible=True)
    c.settle(14)
    c.serve(chat(most=6, gpus=each))
    c.settle(14)
    c.ongoing["chat"] = asked
    taken = [len(action.members) for action in c.settle(20) if isinstance(action, Shrink)]
    assert taken == [seats]


def test_a_replica_whose_node_can_be_bought_waits_for_it_unless_its_endpoint_is_overloaded() -> None:
    more = GPU4.model_copy(update={"max_nodes": 2})
    slow = World(more, ALONE, spec=chat().model_copy(update={"labels": SHARED}))
    assert (slow.members(), slow.seated()) == (4, 1), "nothing is asked of it yet: its first replica waited for a node"
    more = GPU4.model_copy(update={"max_nodes": 3, "resources": {"GPU": 4.0}})
    w = World(more, ALONE)
    w.load(6.0)
    actions = w.after(1)
    (shrink,) = [action for action in actions if isinstance(action, Shrink)]
    assert "the load is more than the ready replicas (1) can carry" in shrink.rejected[0].reason
    assert not [action for action in actions if isinstance(action, Launch)]
    w.after(4)
    assert (w.members(), w.seated()) == (2, 3)
    launches = [action for action in w.after(int(SETTLE_S)) if isinstance(action, Launch)]
    assert len(launches) == 1, "then a node is bought, for the trainer"
    w.after(12)
    assert (w.members(), w.seated()) == (4, 3)


def test_a_node_that_is_ready_sooner_than_a_trainer_shrinks_is_waited_for() -> None:
    quick = GPU4.model_copy(update={"max_nodes": 2})
    w = World(quick, ALONE)
    w.c.book.nodes = {
        id: replace(node, ready_at_s=node.requested_at_s + 2.0) if node.type == "gpu4" else node
        for id, node in w.c.book.nodes.items()
    }
    w.load(6.0)
    assert [type(action).__name__ for action in w.after(1)] == ["Scale", "Launch"]


def test_borrowers_and_lower_classes_give_first_and_as_few_gpus_stand_still_as_can_be() -> None:
    wide = GPU4.model_copy(update={"resources": {"GPU": 12.0}})
    c = Cluster((wide, ALONE), UnmanagedSection(max_nodes=0))
    big, small, high = (
        c.submit(one_gpu(members, 1), preemptible=True, priority=priority)
        for members, priority in ((6, "normal"), (3, "normal"), (3, "high"))
    )
    c.settle(14)
    c.serve(chat())
    c.settle(14)
    c.ongoing["chat"] = 4.0
    assert [a.job_id for a in c.settle(1) if isinstance(a, Shrink)] == [small]
    c.ongoing["chat"] = 8.0
    c.settle(4)
    taken = {lease.job_id: 12 - len(lease.usable) for lease in c.book.leases.values()}
    assert taken[high] == 12 - 3
    assert {big, small, high} == set(taken)


def test_room_that_ray_does_not_show_yet_is_not_vacated_twice() -> None:
    w = World()
    w.load(4.0)
    w.after(1)
    seen = w.c.seen
    shrunk = w.lease()
    seen = replace(seen, leases=(shrunk,))
    (view,) = seen.endpoints
    assert UnattributedUsage(seen).yielded_slots(view, 0) == [(shrunk.members[3].node_id, {"GPU": 1.0})]
    w.after(1)
    parked = w.lease()
    assert parked.members[3].is_parked
    still_taken = replace(seen, at_s=w.c.clock.now_s(), leases=(parked,))
    assert len(UnattributedUsage(still_taken).yielded_slots(view, 0)) == 1, (
        "Ray counts the seat although nobody that is known sits there"
    )
    asked, _ = set_targets(still_taken)
    queued = Demand({"GPU": 1.0}, replica_selector(w.spec))
    room = admission_state(replace(asked, demand=(queued,))).room
    assert room.replicas["chat"][0].node_id == shrunk.members[3].node_id
    two = tuple(replace(v, endpoint=replace(v.endpoint, target_replicas=3)) for v in asked.endpoints)
    more = decide(replace(asked, endpoints=two, demand=(queued,)))
    assert [len(a.members) for a in more.actions if isinstance(a, Shrink)] == [1], "it counts for one replica only"
    freed = tuple(
        replace(view, available={"GPU": 1.0}) if view.node.type == "gpu4" else view for view in still_taken.nodes
    )
    assert UnattributedUsage(replace(still_taken, nodes=freed)).yielded_slots(view, 0) == []
    w.after(int(LAG_S) + 1)
    assert w.lease().members[3].node_id == ""


@settings(max_examples=6, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 10), st.integers(1, 25)), min_size=1, max_size=6),
    crashes=st.lists(st.tuples(st.integers(0, 80), st.sampled_from(CRASH_POINTS), st.integers(0, 3)), max_size=4),
    nimble=st.booleans(),
)
def test_members_are_preempted_no_more_often_than_the_target_rises_and_all_come_back(
    loads: list[tuple[int, int]], crashes: list[tuple[int, str, int]], nimble: bool
) -> None:
    w = World(at_least=1)
    w.c.nimble = nimble
    shrinks, rises, tick, target = 0, 0, 0, w.c.book.endpoints["chat"].target_replicas
    crash = {at: (point, inside) for at, point, inside in crashes}
    for ongoing, ticks in [*loads, (0, 90)]:
        w.load(float(ongoing))
        for _ in range(ticks):
            point, inside = crash.get(tick, (None, 0))
            before = w.lease()
            w.c.tick(crash=point, crash_in=inside)  # type: ignore[arg-type]
            tick += 1
            now, after = w.c.book.endpoints["chat"].target_replicas, w.lease()
            rises += max(0, now - target)
            target = now
            shrinks += len(_given(after) - _given(before))
            assert len(after.usable) >= after.shape.at_least
            for machine in w.c.ray.running().values():
                assert all(amount >= -1e-9 for amount in w.c.ray.free(machine).values()), "a seat was taken twice"
    assert shrinks <= rises
    assert (w.members(), w.seated()) == (4, 1)


def _given(lease: Lease) -> set[tuple[int, int]]:
    """Yielded members with their incarnation, so that a member that yields again counts again."""
    return {
        (m.index, m.incarnation - m.is_parked) for m in lease.members if m.given_to and (m.gives_way or m.is_parked)
    }


def test_replicas_count_against_the_quota_of_their_team() -> None:
    w = World(team="blue", spec=chat(team="blue"))
    blue = Team("blue", TeamSpec(quota={"GPU": 5.0}))
    quotas = admission_state(replace(w.c.seen, teams=(blue,))).quotas
    assert quotas.held("blue", "GPU") == 5.0
    assert quotas.nonpreemptible_left("blue", "GPU") == 4.0, "a replica is not taken back"


def test_a_gang_whose_deadline_leaves_no_time_gives_nothing() -> None:
    w = World()
    w.load(6.0)
    w.after(1)
    asked, _ = set_targets(w.c.seen)
    assert [action.job_id for action in schedule(asked) if isinstance(action, Shrink)] == [w.job]
    urgent = MarketConstraint((CapacityType.ON_DEMAND,), True, 2e3, None, None, "it is late")
    late = replace(asked, stances={w.job: urgent})
    assert not [action for action in schedule(late) if isinstance(action, Shrink)]


def test_a_starting_replica_has_room_although_its_node_is_not_reported() -> None:
    w = World(at_least=1)
    w.load(6.0)
    w.after(5)
    assert (w.members(), w.seated()) == (2, 3)
    w.after(1)
    (view,) = w.c.seen.endpoints
    assert view.load is not None
    starting = replace(view, load=replace(view.load, replica_nodes=view.load.replica_nodes[:-1], ready=2, ongoing=4.0))
    seen = replace(w.c.seen, endpoints=(starting,))
    assert "chat" not in admission_state(seen).room.missing
    assert not [action for action in decide(seen).actions if isinstance(action, Launch | Shrink)]
    queued = replace(seen, demand=(Demand({"GPU": 1.0}, replica_selector(w.spec)),))
    assert [action.members for action in decide(queued).actions if isinstance(action, Shrink)] == [(1,)]
