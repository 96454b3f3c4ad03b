"""Doing what was decided: one call that fails is named, and the others are made all the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from raytide.actors.gang.placement_groups import GroupKey, PlacementGroupInfo
from raytide.autoscaler.providers.base import Machine
from raytide.control.reconcile.apply import ApplyResult, apply
from raytide.control.reconcile.observation import ClusterObservation, Sources, observe
from raytide.control.reconcile.records import ClusterRecords
from raytide.core.errors import ProviderError
from raytide.core.objects.gang import GangSpec, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import CapacityType, Node, NodeState, NodeType
from raytide.core.objects.plan import Drain, Plan
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus

CPU = NodeType(name="cpu", resources={"CPU": 4}, price_micro_usd_h=1)
NODE = Node(
    id="node-1",
    type="cpu",
    zone="a",
    market=CapacityType.ON_DEMAND,
    price_micro_usd_h=1,
    state=NodeState.REQUESTED,
    requested_at_s=1.0,
)
MACHINE = Machine("node-2", "cpu", "a", started_at_s=2.0, price_micro_usd_h=1)
SILENT = ClusterObservation(None, (), None, (), None, None, {})


@dataclass
class Outside:
    """Every source in one: it writes down what it is asked for; what is in `broken` fails instead."""

    broken: dict[str, Exception] = field(default_factory=dict)
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> object:
            if name in self.broken:
                raise self.broken[name]
            self.calls.append((name, *args))
            return {"machines": (), "agents": {}, "measured": {}}.get(name, True)

        return call

    @property
    def names(self) -> list[object]:
        return [call[0] for call in self.calls]


def done(outside: Outside, world: ClusterObservation, *nodes: Node, actions: tuple[Drain, ...] = ()) -> ApplyResult:
    sources = Sources(*cast(Any, [outside] * 7))
    book = ClusterRecords(nodes={node.id: node for node in nodes})
    return apply(book, Plan(1000.0, actions), world, sources, {"cpu": CPU}, 1000.0)


def test_a_call_that_fails_is_named_and_the_next_ones_are_made() -> None:
    outside = Outside(broken={"launch": RuntimeError("connection reset")})
    ending = replace(NODE, id="node-2", state=NodeState.TERMINATING)
    outcome = done(outside, replace(SILENT, machines=(MACHINE,)), NODE, ending)
    assert outcome.errors == ["launch node-1: connection reset"]
    assert outcome.nodes == {}, "it is launched again by the next tick"
    assert outside.calls == [("terminate", "node-2")]


def test_a_launch_that_the_provider_refuses_ends_the_node_with_its_words() -> None:
    outside = Outside(broken={"launch": ProviderError("no cpu left in a.")})
    outcome = done(outside, replace(SILENT, machines=()), NODE)
    assert outcome.errors == []
    assert outcome.nodes["node-1"].state is NodeState.GONE
    assert "no cpu left in a." in outcome.nodes["node-1"].reason


def test_a_pool_that_refused_is_not_asked_again_in_the_same_pass() -> None:
    outside = Outside()
    asked: list[str] = []

    def launch(node: Node, node_type: NodeType) -> None:
        asked.append(node.id)
        if node.zone == "a":
            raise ProviderError("none left.")

    outside.launch = launch  # type: ignore[attr-defined]
    new = replace(NODE, requested_at_s=1000.0)
    nodes = (new, replace(new, id="node-2"), replace(new, id="node-3", zone="b"))
    outcome = done(outside, replace(SILENT, machines=()), *nodes)
    assert asked == ["node-1", "node-3"], "the first launch was the probe"
    assert {id: node.state for id, node in outcome.nodes.items()} == {
        "node-1": NodeState.GONE,
        "node-2": NodeState.GONE,
    }


def test_a_refusal_ends_no_node_that_was_asked_for_earlier() -> None:
    outside = Outside()

    def launch(node: Node, node_type: NodeType) -> None:
        if node.id == "node-1":
            raise ProviderError("its job was cancelled.")

    outside.launch = launch  # type: ignore[attr-defined]
    outcome = done(outside, replace(SILENT, machines=()), NODE, replace(NODE, id="node-2"))
    assert set(outcome.nodes) == {"node-1"}, "node-2 waits in the provider's queue"


def test_a_node_whose_type_left_the_configuration_is_not_launched() -> None:
    outside = Outside()
    outcome = done(outside, replace(SILENT, machines=()), replace(NODE, type="gpu"))
    assert "launch" not in outside.names
    assert outcome.nodes["node-1"].state is NodeState.GONE
    assert "node type gpu was removed" in outcome.nodes["node-1"].reason


def test_only_a_node_that_ray_knows_is_drained() -> None:
    outside = Outside()
    ready = replace(NODE, id="node-2", state=NodeState.READY, ray_node_id="ray-2")
    ended = replace(NODE, id="node-3", state=NodeState.TERMINATING, ray_node_id="ray-3")
    drains = tuple(Drain(f"node-{n}", "idle", 1030.0, "idle") for n in (1, 2, 3))
    outcome = done(outside, SILENT, NODE, ready, ended, actions=drains)
    assert outside.calls == [("drain", "ray-2", "idle", 1030.0, "idle")]
    assert list(outcome.nodes) == ["node-2"]


def test_groups_and_drivers_that_nobody_wants_are_ended() -> None:
    outside = Outside()
    group = PlacementGroupInfo(GroupKey("lease-9", 0, 0), "ready", "ab")
    driver = DriverKey("job-9", 0)
    world = replace(SILENT, groups={group.key: group}, drivers={driver: DriverStatus(driver, "running")})
    assert done(outside, world).errors == []
    assert outside.calls == [("remove", (group,)), ("stop", driver)]


def test_ray_is_made_to_forget_the_oldest_drivers_of_jobs_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tick lists all that Ray remembers: with every job the look would take longer, and at last too long."""
    monkeypatch.setattr("raytide.control.reconcile.apply.MOST_ENDED", 2)
    monkeypatch.setattr("raytide.control.reconcile.apply.MOST_FORGOTTEN", 3)
    keys = [DriverKey(f"job-{number}", attempt) for number in (2, 11, 10, 9, 8) for attempt in (0, 1)]
    drivers = {key: DriverStatus(key, "died" if key.attempt else "succeeded") for key in keys}
    drivers[DriverKey("job-1", 0)] = DriverStatus(DriverKey("job-1", 0), "running")
    spec = JobSpec(kind=JobKind.TRAIN, name="j", gang=GangSpec(shapes=(Shape(resources={"CPU": 1.0}),)))
    live = {key: Job(key, spec, "me", JobState.RUNNING, 0.0, restarts=1) for key in ("job-1", "job-2")}
    outside = Outside()
    sources = Sources(*cast(Any, [outside] * 7))
    world = replace(SILENT, drivers=drivers)
    assert apply(ClusterRecords(jobs=live), Plan(1000.0, ()), world, sources, {"cpu": CPU}, 1000.0).errors == []
    forgotten = [call[1] for call in outside.calls if call[0] == "forget"]
    assert forgotten == [DriverKey("job-8", 0), DriverKey("job-8", 1), DriverKey("job-9", 0)]


def test_silence_of_a_source_leads_to_no_deed_for_it() -> None:
    outside = Outside()
    assert done(outside, SILENT, NODE) == ApplyResult()
    assert outside.calls == []


def test_a_source_that_does_not_answer_is_unknown_and_named_while_the_others_are_heard() -> None:
    outside = Outside(broken={"nodes": TimeoutError("no answer"), "loads": TimeoutError("busy")})
    world = observe(Sources(*cast(Any, [outside] * 7)), endpoints=("m", "n"), with_drivers=False, with_gangs=False)
    assert world.ray_nodes is None
    assert world.machines is not None
    assert world.drivers == {}
    assert world.loads == {}
    assert world.errors == ("ray: no answer", "Ray Serve: busy"), "one question for all endpoints"


def test_half_an_answer_of_ray_is_none_and_names_outlast_a_provider_that_is_silent() -> None:
    outside = Outside(broken={"demand": TimeoutError("no answer"), "machines": TimeoutError("busy")})
    sources = Sources(*cast(Any, [outside] * 7))
    world = observe(sources, endpoints=(), with_drivers=False, with_gangs=False, names={"pod-1": "node-1"})
    assert world.ray_nodes is None
    assert world.names == {"pod-1": "node-1"}
    del outside.broken["machines"]
    assert observe(sources, endpoints=(), with_drivers=False, with_gangs=False, names={"pod-1": "node-1"}).names == {}
