"""A fleet that costs more than it may loses what is worth least, and no more than that."""

from __future__ import annotations

from dataclasses import replace

from tests.autoscaler import promises
from tests.autoscaler.world import Cluster

from raytide.autoscaler.explain import lines
from raytide.core.objects.cluster_config import UnmanagedSection
from raytide.core.objects.endpoint import Replicas, ServeSpec
from raytide.core.objects.gang import LeaseState, Shape
from raytide.core.objects.job import JobState
from raytide.core.objects.node import NodeType
from raytide.core.objects.plan import Action, Drain, Launch, Plan, Preempt, Shrink, Terminate, Wait
from raytide.core.objects.snapshot import Limits

GPU = NodeType(name="gpu", resources={"GPU": 2}, price_micro_usd_h=3_000_000, max_nodes=8, idle_timeout_s=1e6)
CPU = NodeType(name="cpu", resources={"CPU": 4}, price_micro_usd_h=1_000_000, max_nodes=8, idle_timeout_s=1e6)
ONE = Shape(resources={"GPU": 2})
SPEC = ServeSpec(name="m", model="/m", resources={"GPU": 2}, replicas=Replicas(min=1, max=4, target_ongoing=4))


def cluster() -> Cluster:
    return Cluster((CPU, GPU), unmanaged=UnmanagedSection(max_nodes=2), watch=promises.check)


def cap(here: Cluster, usd_h: float) -> None:
    limit = int(usd_h * 1e6)
    here.limits = Limits(hard_micro_usd_h=limit, most_micro_usd_h=limit)


def deeds(here: Cluster) -> list[Action]:
    return [action for action in here.tick() if not isinstance(action, Wait)]


def left(here: Cluster) -> list[str]:
    return sorted(machine.node_id for machine in here.machines())


def node_of(here: Cluster, job_id: str) -> str:
    (lease,) = [lease for lease in here.book.leases.values() if lease.job_id == job_id]
    return lease.members[0].node_id


def test_nothing_goes_while_the_fleet_costs_what_it_may() -> None:
    here = cluster()
    here.submit(ONE, preemptible=True)
    here.settle(20)
    cap(here, 3.0)
    assert here.settle(50) == []


def test_idle_nodes_go_first_then_work_without_a_lease_then_gangs_by_class() -> None:
    here = cluster()
    low, normal = here.submit(ONE, preemptible=True, priority="low"), here.submit(ONE, preemptible=True)
    here.settle(20)
    here.run_task({"CPU": 4.0})
    done = here.submit(ONE)
    here.settle(20)
    idle, lows, normals = node_of(here, done), node_of(here, low), node_of(here, normal)
    here.finish(done)
    here.settle(10)
    (task,) = [machine.node_id for machine in here.machines() if machine.node_type == "cpu"]
    order = []
    for usd_h in (9.0, 6.5, 5.0, 2.0):
        cap(here, usd_h)
        order += [
            action.node_id for action in here.settle(100) if isinstance(action, Drain) and action.cost_micro_usd_h
        ]
        here.ray.work = [work for work in here.ray.work if work.node_id]
    assert order == [idle, task, lows, normals]
    assert left(here) == []
    assert {here.book.jobs[job].state for job in (low, normal)} == {JobState.QUEUED}


def test_gangs_have_time_for_a_checkpoint_wait_in_the_queue_and_go_on_when_the_limit_is_raised() -> None:
    here = cluster()
    here.nimble = False
    job = here.submit(ONE, preemptible=True)
    here.settle(20)
    (machine,) = here.machines()
    cap(here, 1.0)
    preempt, drain = deeds(here)
    assert isinstance(preempt, Preempt)
    assert isinstance(drain, Drain)
    assert preempt.leaves_at_s == drain.deadline_s == here.clock.now_s() + 60.0
    assert drain.kind == "notice"
    assert drain.reason == "the fleet costs $3.00/h, above the hard limit of $1.00/h; job-1 is preempted"
    here.settle(50)
    assert here.machines() == [machine]
    here.settle(20)
    assert here.machines() == []
    assert here.book.jobs[job].state is JobState.QUEUED
    (wait,) = here.tick()
    assert isinstance(wait, Wait)
    assert (wait.subject, wait.constraint) == (job, "budget")
    cap(here, 4.0)
    here.settle(20)
    assert here.book.jobs[job].state is JobState.RUNNING


def test_an_elastic_gang_shrinks_before_any_of_its_class_stops() -> None:
    here = cluster()
    elastic = here.submit(Shape(members=3, min_members=1, resources={"GPU": 2}), preemptible=True)
    here.submit(ONE, preemptible=True)
    here.settle(20)
    cap(here, 6.0)
    actions = deeds(here)
    assert [(a.job_id, len(a.members)) for a in actions if isinstance(a, Shrink)] == [(elastic, 2)]
    assert not any(isinstance(action, Preempt) for action in actions)
    here.settle(90)
    assert len(here.machines()) == 2
    assert all(job.state is JobState.RUNNING for job in here.book.jobs.values())


def test_a_gang_that_has_to_stop_leaves_all_its_nodes_before_another_is_disturbed() -> None:
    here = cluster()
    pair = here.submit(Shape(members=2, resources={"GPU": 2}), preemptible=True, priority="low")
    here.submit(ONE, preemptible=True, priority="low")
    here.settle(20)
    cap(here, 5.0)
    stopped = [action.job_id for action in deeds(here) if isinstance(action, Preempt)]
    assert len(stopped) <= 2
    here.settle(90)
    running = [job.id for job in here.book.jobs.values() if job.state is JobState.RUNNING]
    assert len(here.machines()) == sum(x.state is LeaseState.ACTIVE for x in here.book.leases.values())
    assert running == ["job-2"] or stopped == ["job-2", pair]


def test_of_equal_worth_the_smallest_that_is_enough_goes() -> None:
    here = cluster()
    for shape in (ONE, Shape(resources={"CPU": 4})):
        here.submit(shape, preemptible=True)
    here.settle(20)
    cap(here, 3.5)
    assert [a.job_id for a in deeds(here) if isinstance(a, Preempt)] == ["job-2"]


def test_replicas_and_gangs_that_may_not_be_preempted_stay_and_it_is_said() -> None:
    here = cluster()
    here.submit(ONE)
    here.serve(SPEC, ongoing=4.0)
    here.settle(30)
    cap(here, 1.0)
    waits = [action for action in here.tick() if isinstance(action, Wait) and action.subject == "fleet"]
    assert waits[0].reason == (
        "the fleet costs $6.00/h, above the hard limit of $1.00/h; the remaining $6.00/h serve, or may not be preempted"
    )
    assert here.settle(60) == []
    assert len(here.machines()) == 2


def test_a_node_that_is_still_starting_for_a_gang_that_gives_way_is_ended_at_once() -> None:
    here = cluster()
    here.submit(ONE, preemptible=True)
    here.tick()
    here.tick()
    cap(here, 1.0)
    actions = deeds(here)
    assert [type(action) for action in actions] == [Preempt, Terminate]
    here.settle(10)
    assert here.machines() == []


def test_while_ray_is_silent_nothing_goes() -> None:
    here = cluster()
    here.submit(ONE, preemptible=True)
    here.settle(20)
    cap(here, 0.0)
    here.ray.is_silent = True
    assert here.settle(20) == []


def test_what_the_limit_drains_is_not_bought_again_nor_its_minimum() -> None:
    here = Cluster((CPU.model_copy(update={"min_nodes": 2}),), watch=promises.check)
    here.settle(20)
    assert len(here.machines()) == 2
    cap(here, 1.0)
    actions = here.settle(300)
    assert not any(isinstance(action, Launch) for action in actions)
    assert len(here.machines()) == 1


def test_a_price_that_rises_is_a_reason_too_when_it_rises_by_more_than_a_little() -> None:
    here = cluster()
    here.submit(ONE, preemptible=True)
    here.settle(20)
    cap(here, 3.0)
    (machine,) = here.machines()
    here.provider.adopt(replace(machine, price_micro_usd_h=3_100_000))
    assert here.settle(20) == []
    here.provider.adopt(replace(machine, price_micro_usd_h=3_500_000))
    assert [a.node_id for a in deeds(here) if isinstance(a, Drain)] == [machine.node_id]


def test_nodes_that_cost_nothing_stay_whatever_runs_there() -> None:
    own = GPU.model_copy(update={"name": "own", "price_micro_usd_h": 0, "max_nodes": 2, "min_nodes": 2})
    here = Cluster((own, GPU), watch=promises.check)
    here.settle(20)
    here.submit(ONE, preemptible=True)
    here.settle(20)
    for _ in range(2):
        here.submit(ONE)
    here.settle(20)
    cap(here, 1.0)
    assert len(here.machines()) == 3
    assert here.settle(20) == []


def test_while_an_endpoint_is_silent_no_node_goes_whose_work_may_be_its_replica() -> None:
    here = Cluster((GPU.model_copy(update={"min_nodes": 1}),), watch=promises.check)
    here.settle(20)
    here.serve(SPEC)
    here.submit(ONE, preemptible=True)
    here.settle(30)
    assert len(here.machines()) == 2
    here.silent.add("m")
    here.loads.clear()
    cap(here, 1.0)
    actions = here.tick()
    assert [type(a) for a in actions if not isinstance(a, Wait)] == [Preempt, Drain]
    (wait,) = [action for action in actions if isinstance(action, Wait) and action.subject == "fleet"]
    assert "the remaining $3.00/h serve (m: unknown where)" in wait.reason


def test_explain_says_what_it_saves() -> None:
    here = cluster()
    here.submit(ONE, preemptible=True)
    here.settle(20)
    cap(here, 1.0)
    plan = Plan(here.clock.now_s(), tuple(deeds(here)))
    said = lines([plan.to_json()])
    assert "preempt" in said[0]
    assert said[1].endswith("above the hard limit of $1.00/h; job-1 is preempted (-$3.00/h)")
    assert said[2].strip() == "not keep node-1: the other nodes that could leave are worth more (+$3.00/h)"
