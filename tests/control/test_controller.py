"""The control loop on a virtual clock, against a world in memory: the same code, killed wherever it can be killed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stores import new_store

from raytide.actors.gang.placement_groups import GroupKey, PlacementGroupInfo, WantedGroup
from raytide.actors.serving.ray_serve.application import Application
from raytide.autoscaler.nodes.energy import EnergyMeter
from raytide.autoscaler.nodes.orders import DRAIN_S
from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.ray_gcs import RayNode
from raytide.control.accounting.final_accounting import close_books
from raytide.control.controller import Controller
from raytide.control.reconcile.observation import Sources
from raytide.control.views import Live, from_json
from raytide.core.clock import VirtualClock
from raytide.core.errors import ProviderError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.endpoint import Endpoint, EndpointState, Replicas, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad
from raytide.core.objects.gang import GangSpec, LeaseState, Shape
from raytide.core.objects.job import JobKind, JobSpec, JobState
from raytide.core.objects.ledger_entry import EntryKind
from raytide.core.objects.node import Node, NodeMeasurement, NodeState, NodeType, Signal, Use, minus, plus
from raytide.core.objects.plan import Wait
from raytide.core.specs.order import OrderKind, OrderSpec
from raytide.ledger.reconcile import reconcile
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus

CONFIG = load_cluster(Path(__file__).parents[2] / "platform" / "raytide" / "control" / "bootstrap" / "local.yaml")
TICK_S = 0.5
BOOT_S = 2.0


class Killed(BaseException):
    """The process is gone: nothing catches this."""


@dataclass
class World:
    """Provider, Ray, drivers and Serve in one, each with just enough behaviour. `fuse` kills at the n-th call."""

    clock: VirtualClock
    bought: dict[str, Machine] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    noticed: dict[str, float] = field(default_factory=dict)
    stocked_out: set[str] = field(default_factory=set)
    types: dict[str, NodeType] = field(default_factory=dict)
    placed: dict[GroupKey, tuple[WantedGroup, str]] = field(default_factory=dict)
    taken: dict[str, dict[str, float]] = field(default_factory=dict)
    """The resources of each of Ray's nodes that ready groups take."""
    running: dict[DriverKey, DriverStatus] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    serving: dict[str, int] = field(default_factory=dict)
    routes: dict[str, bytes] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    """Replicas that were restarted on request."""
    ongoing: float = 0.0
    use: dict[str, Use] = field(default_factory=dict)
    api_answers: bool = True
    serve_answers: bool = True
    fuse: int | None = None

    def step(self) -> None:
        """Every outside call that changes something goes through here, before or after it has taken effect."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise Killed

    def is_up(self, machine: Machine) -> bool:
        return machine.ended_at_s is None and self.clock.now_s() - machine.started_at_s >= BOOT_S

    def end(self, node_id: str, reason: str) -> None:
        machine = self.bought.get(node_id)
        if machine is not None and machine.ended_at_s is None:
            self.bought[node_id] = replace(machine, ended_at_s=self.clock.now_s(), reason=reason)

    def hosts(self, name: str) -> list[str]:
        """Replicas have two CPUs each, and sit on the oldest nodes that are up."""
        up = [
            node_id for node_id, machine in self.bought.items() if self.is_up(machine) and node_id not in self.drained
        ]
        return up[: self.serving.get(name, 0)]

    def used_on(self, node_id: str) -> dict[str, float]:
        replicas = {"CPU": 2.0} if any(node_id in self.hosts(name) for name in self.serving) else {}
        return plus(replicas, self.taken.get(f"ray-{node_id}", {}))

    def take(self, group: WantedGroup, sign: float = 1.0) -> None:
        taken = self.taken.setdefault(group.ray_node_id, {})
        for name, amount in group.resources.items():
            if not (left := round(taken.get(name, 0.0) + sign * amount, 9)):
                taken.pop(name, None)
            else:
                taken[name] = left


class Provider:
    def __init__(self, world: World) -> None:
        self.world = world

    def launch(self, node: Node, node_type: NodeType) -> None:
        self.world.step()
        if node.id in self.world.bought:
            return
        if node_type.name in self.world.stocked_out:
            raise ProviderError(f"no {node_type.name} to be had.")
        self.world.launches.append(node.id)
        self.world.types[node.id] = node_type
        now_s = self.world.clock.now_s()
        self.world.bought[node.id] = Machine(node.id, node_type.name, node.zone, node.price_micro_usd_h, now_s)
        self.world.step()

    def terminate(self, node_id: str) -> None:
        self.world.step()
        self.world.end(node_id, "terminated")
        self.world.step()

    def machines(self) -> tuple[Machine, ...]:
        return tuple(self.world.bought.values())

    def notices(self) -> tuple[Notice, ...]:
        return tuple(Notice(*item) for item in self.world.noticed.items())

    def prices(self) -> dict[tuple[str, str], int]:
        return {}

    def problems(self) -> tuple[str, ...]:
        return ()

    def watch(self, on_change: object) -> None: ...

    def close(self) -> None: ...


class Meters:
    """`world.use` is what they said last, None for a node that has said nothing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.watched: list[str] = []
        self.energy = EnergyMeter()

    def watch(self, machines: Iterable[Machine], idle: object, others: object) -> None:
        self.watched = [machine.node_id for machine in machines]

    def last_readings(self) -> dict[str, Use]:
        return {node_id: self.world.use[node_id] for node_id in self.watched if node_id in self.world.use}

    def agents(self) -> dict[str, str]:
        return {}

    def exporter_of(self, machine: Machine) -> str:
        return ""

    def measured(self) -> dict[str, NodeMeasurement]:
        return {}


class Gcs:
    def __init__(self, world: World) -> None:
        self.world = world

    def nodes(self) -> tuple[RayNode, ...]:
        found = []
        for node_id, machine in self.world.bought.items():
            if self.world.is_up(machine):
                total = self.world.types[node_id].resources
                free = minus(total, self.world.used_on(node_id))
                is_draining = node_id in self.world.drained
                found.append(RayNode(f"ray-{node_id}", node_id, True, is_draining, total, free))
        return tuple(found)

    def demand(self) -> tuple[Any, ...]:
        return ()

    def report(self, nodes: Iterable[Node]) -> None: ...

    def drain(self, ray_node_id: str, kind: str, deadline_s: float, why: str) -> bool:
        self.world.step()
        node_id = ray_node_id.removeprefix("ray-")
        if kind == "idle" and self.world.used_on(node_id):
            return False
        self.world.drained.add(node_id)
        self.world.step()
        return True


class Groups:
    def __init__(self, world: World) -> None:
        self.world = world

    def list(self) -> dict[GroupKey, PlacementGroupInfo]:
        return {key: PlacementGroupInfo(key, state, "00") for key, (_, state) in self.world.placed.items()}  # type: ignore[arg-type]

    def create(self, wanted: Iterable[WantedGroup]) -> None:
        for group in wanted:
            self.world.step()
            node_id = group.ray_node_id.removeprefix("ray-")
            free = minus(self.world.types[node_id].resources, self.world.used_on(node_id))
            is_ready = all(free.get(name, 0.0) >= amount for name, amount in group.resources.items())
            if group.key not in self.world.placed:
                self.world.placed[group.key] = (group, "ready" if is_ready else "pending")
                if is_ready:
                    self.world.take(group)
            self.world.step()

    def remove(self, groups: Iterable[PlacementGroupInfo]) -> None:
        for group in groups:
            self.world.step()
            wanted, state = self.world.placed[group.key]
            self.world.placed[group.key] = (wanted, "removed")
            if state == "ready":
                self.world.take(wanted, -1.0)


class Drivers:
    def __init__(self, world: World) -> None:
        self.world = world

    def statuses(self) -> dict[DriverKey, DriverStatus]:
        return dict(self.world.running)

    def start(self, key: DriverKey) -> None:
        self.world.step()
        self.world.running.setdefault(key, DriverStatus(key, "running"))
        self.world.step()

    def stop(self, key: DriverKey) -> None:
        self.world.running[key] = DriverStatus(key, "died", "stopped")


class Serve:
    def __init__(self, world: World) -> None:
        self.world = world

    def start(self) -> None: ...

    def applications(self) -> dict[str, Application]:
        return {name: Application() for name in self.world.serving}

    def deploy(self, endpoint: Endpoint, *, is_there: bool) -> bool:
        self.world.serving.setdefault(endpoint.name, endpoint.target_replicas)
        return not is_there

    def publish(self, name: str, target: int) -> None:
        self.world.serving[name] = target

    def publish_route(self, name: str, route: bytes) -> None:
        self.world.routes[name] = route

    def loads(self, names: Iterable[str]) -> dict[str, EndpointLoad]:
        if not self.world.serve_answers:
            raise TimeoutError("Ray Serve did not report its load")
        loads = {}
        for name in self.world.serving.keys() & set(names):
            hosts = [f"ray-{node_id}" for node_id in self.world.hosts(name)]
            now_s = self.world.clock.now_s() + self.world.clock.wall_ahead_s()  # Serve has the machine's clock
            spoke = tuple(ReplicaLoad(host, now_s) for host in hosts)
            pages = {host: f"{host}:9000" for host in hosts}
            loads[name] = EndpointLoad(now_s, self.world.ongoing, len(hosts), tuple(hosts), spoke, pages=pages)
        return loads

    def delete(self, name: str, *, is_there: bool) -> None:
        self.world.serving.pop(name, None)

    def restart_replica(self, name: str, replica: str) -> bool:
        self.world.step()
        is_there = replica not in self.world.killed
        self.world.killed.add(replica)
        self.world.step()
        return is_there


class Api:
    def __init__(self, world: World) -> None:
        self.world = world

    def answers(self) -> bool:
        if not self.world.api_answers:
            raise ConnectionError("connection refused")
        return True


class Loop:
    """A store that survives, and a controller that may not."""

    def __init__(self, folder: Path, clock: Any = None) -> None:
        self.clock = VirtualClock(1_000.0) if clock is None else clock
        self.world = World(self.clock)
        self.store = new_store(folder)
        self.folder = folder
        self.controller = self.fresh()

    def fresh(self) -> Controller:
        w = self.world
        sources = Sources(Provider(w), Gcs(w), Groups(w), Drivers(w), Serve(w), Api(w), Meters(w))  # type: ignore[arg-type]
        return Controller(self.store, CONFIG, sources, self.clock, self.folder / "live.json")

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            ticking = self.controller
            try:
                ticking.tick()
            except Killed:
                self.controller = self.fresh()
            if (served := ticking._serve_sync._pass) is not None:
                served.result(timeout=300)  # it has a thread of its own, and no share in the virtual time
            self.clock.advance(TICK_S)

    def until(self, done: Any, *, ticks: int = 400) -> None:
        for _ in range(ticks):
            if done():
                return
            self.tick()
        raise AssertionError("it did not happen in time")

    def submit(self, *, kind: JobKind = JobKind.TRAIN, **shape: Any) -> str:
        asked = Shape(**{"members": 2, "resources": {"CPU": 1.0}, **shape})
        spec = JobSpec(kind=kind, name="job", gang=GangSpec(shapes=(asked,)))
        return self.store.submit_job(spec, "ana", self.clock.now_s()).id

    def state(self, job_id: str) -> JobState:
        return self.store.job(job_id).state

    def finish(self, job_id: str) -> None:
        key = DriverKey(job_id, self.store.job(job_id).restarts)
        self.world.running[key] = DriverStatus(key, "succeeded")

    def nothing_runs(self) -> bool:
        return all(machine.ended_at_s is not None for machine in self.world.bought.values())

    def check_ledger(self) -> None:
        """End what still runs, close the books, and compare them with the bill."""
        for node_id in self.world.bought:
            self.world.end(node_id, "terminated")
        closed = close_books(self.store, tuple(self.world.bought.values()), self.clock.now_s())
        assert reconcile(self.world.bought.values(), self.store.books.entries()) == ()
        assert closed.differences == ()
        assert closed.cost.booked_micro_usd == closed.cost.billed_micro_usd == closed.cost.booked_ended_micro_usd


def ordered(kind: OrderKind, subject: str, replica: str = "") -> OrderSpec:
    return OrderSpec(id=f"{kind}-{subject}", kind=kind, subject=subject, replica=replica, reason="it is sick")


def nodes_of(loop: Loop, job_id: str) -> set[str]:
    lease = loop.store.lease_of(job_id)
    return set() if lease is None else {member.node_id for member in lease.members}


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    yield made
    made.store.close()


class TestJobs:
    def test_a_gang_goes_from_zero_nodes_to_done_and_back_to_zero(self, loop: Loop) -> None:
        job = loop.submit()
        loop.until(lambda: loop.state(job) is JobState.RUNNING)
        lease = loop.store.lease_of(job)
        assert lease is not None and lease.state is LeaseState.ACTIVE
        assert len(lease.usable) == 2
        loop.until(lambda: DriverKey(job, 0) in loop.world.running)
        loop.finish(job)
        loop.until(lambda: loop.state(job) is JobState.SUCCEEDED)
        loop.until(loop.nothing_runs)
        loop.tick(2)
        assert all(node.state is NodeState.GONE for node in loop.store.nodes())
        assert all(state == "removed" for _, state in loop.world.placed.values())
        loop.check_ledger()
        assert "unmanaged" not in loop.store.books.booked("kind"), "its groups outlived its lease by a tick"

    def test_a_lost_node_is_replaced_and_the_survivor_keeps_its_seat(self, loop: Loop) -> None:
        job = loop.submit(labels={"ray.io/market-type": "spot"})
        loop.until(lambda: loop.state(job) is JobState.RUNNING)
        before = loop.store.lease_of(job)
        assert before is not None
        victim, survivor = before.members
        loop.world.end(victim.node_id, "reclaimed")
        loop.until(lambda: (loop.store.lease_of(job) or before).epoch > before.epoch)
        loop.until(lambda: len((loop.store.lease_of(job) or before).usable) == 2)
        after = loop.store.lease_of(job)
        assert after is not None
        assert after.members[1] == survivor
        assert after.members[0].incarnation == victim.incarnation + 1
        assert loop.state(job) is JobState.RUNNING
        loop.check_ledger()

    def test_work_that_went_with_a_node_is_booked_as_waste_when_the_driver_tells_of_it(self, loop: Loop) -> None:
        job = loop.submit(labels={"ray.io/market-type": "spot"})
        loop.until(lambda: loop.state(job) is JobState.RUNNING)
        before = loop.store.lease_of(job)
        assert before is not None
        victim = before.members[0].node_id
        loop.tick(30)
        loop.world.end(victim, "reclaimed")
        broke_at_s = loop.clock.now_s()
        loop.until(lambda: (loop.store.lease_of(job) or before).epoch > before.epoch)
        spent = loop.store.books.spent([job], "1970-01").jobs[job]
        loop.store.report(job, {"lost_s": 10.0, "lost_at_s": broke_at_s}, loop.clock.now_s())
        loop.tick(3)
        lost = loop.store.books.losses()
        assert {(line.subject, line.team, line.cause) for line in lost} == {(job, "default", victim)}
        price = next(t.price_micro_usd_h for t in CONFIG.node_types if t.name == "cpu1.spot")
        assert sum(line.amount_micro_usd for line in lost) == pytest.approx(2 * price * 10 / 3600, rel=0.01)
        assert loop.store.books.spent([job], "1970-01").jobs[job] >= spent, "it is still what the job cost"
        loop.check_ledger()

    def test_a_notice_lets_the_member_leave_and_the_deadline_is_enforced(self, loop: Loop) -> None:
        job = loop.submit(labels={"ray.io/market-type": "spot"})
        loop.until(lambda: loop.state(job) is JobState.RUNNING)
        lease = loop.store.lease_of(job)
        assert lease is not None
        victim = lease.members[0].node_id
        deadline_s = loop.clock.now_s() + 5.0
        loop.world.noticed[victim] = deadline_s
        loop.tick(2)
        left = loop.store.lease_of(job)
        assert left is not None and left.members[0].leaves_at_s == deadline_s
        assert victim in loop.world.drained
        loop.until(lambda: loop.world.bought[victim].ended_at_s is not None)
        ended_at_s = loop.world.bought[victim].ended_at_s
        assert ended_at_s is not None and deadline_s <= ended_at_s <= deadline_s + 2 * TICK_S

    def test_a_quarantined_node_is_left_replaced_and_kept_until_it_is_released(self, loop: Loop) -> None:
        job = loop.submit()
        loop.until(lambda: loop.state(job) is JobState.RUNNING)
        before = loop.store.lease_of(job)
        assert before is not None
        sick = before.members[0].node_id
        loop.store.orders.add(ordered("quarantine_node", sick), "ana", loop.clock.now_s())
        loop.until(lambda: len((loop.store.lease_of(job) or before).usable) == 2 and sick not in nodes_of(loop, job))
        loop.tick(2 * int(DRAIN_S / TICK_S))
        assert loop.state(job) is JobState.RUNNING
        (kept,) = (node for node in loop.store.nodes(live=True) if node.id == sick)
        assert (kept.state, kept.quarantined) == (NodeState.DRAINING, "it is sick")
        assert loop.world.bought[sick].ended_at_s is None
        loop.store.orders.add(ordered("release_node", sick), "ana", loop.clock.now_s())
        loop.until(lambda: loop.world.bought[sick].ended_at_s is not None)
        loop.check_ledger()

    @pytest.mark.parametrize("fuse", range(4))
    def test_a_replica_is_restarted_once_though_the_controller_is_killed(self, loop: Loop, fuse: int) -> None:
        order = ordered("restart_replica", "chat", replica="abc")
        loop.tick()
        loop.store.orders.add(order, "ana", loop.clock.now_s())
        loop.world.fuse = fuse
        loop.until(lambda: loop.store.orders.get(order.id).done_at_s is not None)
        assert loop.world.killed == {"abc"}
        assert loop.store.load().orders == ()

    def test_an_exhausted_pool_is_left_alone_and_the_job_says_so(self, loop: Loop) -> None:
        loop.world.stocked_out = {"cpu1.spot"}
        job = loop.submit(labels={"ray.io/market-type": "spot"})
        loop.tick(20)
        assert loop.world.launches == []
        assert loop.state(job) in (JobState.QUEUED, JobState.ADMITTED)
        pools = {(pool.node_type, pool.zone): pool.failures for pool in loop.store.load().pools}
        assert 0 < sum(pools.values()) <= 4
        loop.world.stocked_out = set()
        loop.until(lambda: loop.state(job) is JobState.RUNNING, ticks=1000)

    def test_a_gang_whose_first_shape_sells_out_gets_its_second(self, loop: Loop) -> None:
        spot, owned = ({"ray.io/market-type": market} for market in ("spot", "on-demand"))
        shapes = tuple(Shape(members=2, resources={"CPU": 1.0}, labels=labels) for labels in (spot, owned))
        loop.world.stocked_out = {"cpu1.spot"}
        spec = JobSpec(kind=JobKind.TRAIN, name="either", gang=GangSpec(shapes=shapes))
        job = loop.store.submit_job(spec, "ana", loop.clock.now_s()).id
        loop.until(lambda: loop.state(job) is JobState.RUNNING, ticks=100)
        lease = loop.store.lease_of(job)
        assert lease is not None and lease.shape == shapes[1]
        assert set(loop.world.running) == {DriverKey(job, 0)}
        assert loop.store.job(job).restarts == 0
        loop.check_ledger()

    def test_a_driver_that_died_is_started_again_and_one_that_failed_is_not(self, loop: Loop) -> None:
        job = loop.submit()
        loop.until(lambda: DriverKey(job, 0) in loop.world.running)
        loop.world.running[DriverKey(job, 0)] = DriverStatus(DriverKey(job, 0), "died", "killed")
        loop.until(lambda: DriverKey(job, 1) in loop.world.running)
        loop.world.running[DriverKey(job, 1)] = DriverStatus(DriverKey(job, 1), "failed", "bad data")
        loop.until(lambda: loop.state(job) is JobState.FAILED)
        assert "bad data" in loop.store.job(job).reason

    def test_stop_ends_the_driver_and_frees_the_nodes(self, loop: Loop) -> None:
        job = loop.submit()
        loop.until(lambda: DriverKey(job, 0) in loop.world.running)
        loop.store.request_stop(job)
        loop.until(lambda: loop.state(job) is JobState.STOPPED)
        loop.until(loop.nothing_runs)

    def test_a_gang_whose_driver_went_silent_loses_its_lease(self, loop: Loop) -> None:
        job = loop.submit(kind=JobKind.GANG)
        for _ in range(10):
            loop.store.heartbeat(job, loop.clock.now_s())
            loop.tick()
        assert loop.state(job) is JobState.RUNNING
        loop.until(lambda: loop.state(job) is JobState.FAILED, ticks=30)
        loop.until(loop.nothing_runs)

    def test_a_gang_outlives_an_api_that_nobody_can_reach(self, loop: Loop) -> None:
        job = loop.submit(kind=JobKind.GANG)
        loop.until(lambda: loop.state(job) is JobState.RUNNING)
        loop.world.api_answers = False
        loop.tick(60)
        loop.world.api_answers = True
        loop.tick(10)
        assert loop.state(job) is JobState.RUNNING, "its driver is given its time to come back"
        loop.until(lambda: loop.state(job) is JobState.FAILED, ticks=30)


class TestEndpoints:
    def test_replicas_follow_the_load_and_nodes_follow_the_replicas(self, loop: Loop) -> None:
        replicas = Replicas(min=1, max=3, target_ongoing=4, downscale_delay_s=3)
        spec = ServeSpec(name="m", model="/m", replicas=replicas, resources={"CPU": 2})
        loop.store.save_endpoint(spec, "ana", loop.clock.now_s())

        def settled(count: int) -> bool:
            live = [m for m in loop.world.bought.values() if m.ended_at_s is None]
            return loop.world.serving.get("m") == count == len(live) and all(map(loop.world.is_up, live))

        def eventually(count: int) -> None:
            for _ in range(300):
                if settled(count):
                    return
                loop.tick()
            raise AssertionError(f"never settled at {count}")

        eventually(1)
        loop.until(lambda: loop.store.endpoint("m").state is EndpointState.RUNNING)
        loop.world.ongoing = 12.0
        eventually(3)
        loop.world.ongoing = 0.0
        loop.until(lambda: loop.store.endpoint("m").target_replicas == 1)
        loop.store.request_delete("m")
        loop.until(lambda: loop.store.endpoint("m").state is EndpointState.DELETED, ticks=100)
        loop.until(loop.nothing_runs, ticks=100)
        loop.tick()
        loop.check_ledger()

    def test_replicas_stay_shown_for_a_minute_while_serve_does_not_answer(self, loop: Loop) -> None:
        spec = ServeSpec(name="m", model="/m", replicas=Replicas(min=1, max=1), resources={"CPU": 2})
        loop.store.save_endpoint(spec, "ana", loop.clock.now_s())

        def shown() -> tuple[int, int]:
            live = from_json(Live, json.loads((loop.folder / "live.json").read_text()))
            pages = sum(target.job == "raytide-replica" for target in live.targets)
            return (live.loads["m"].ready if "m" in live.loads else 0), pages

        loop.until(lambda: (loop.folder / "live.json").exists() and shown() == (1, 1), ticks=300)
        loop.world.serve_answers = False
        for _ in range(10):
            loop.tick()
            assert shown() == (1, 1)
        until_s = loop.clock.now_s() + 61.0
        loop.until(lambda: loop.clock.now_s() > until_s, ticks=1_000)
        loop.tick()
        assert shown() == (0, 0)
        loop.world.serve_answers = True
        loop.tick()
        assert shown() == (1, 1)

    def test_replicas_follow_a_reported_value_and_the_hour(self, loop: Loop) -> None:
        fields = {"max": 5, "scale_on": [{"name": "queue", "target": 10}], "schedule": [{"min": 2, "begin": "12:00"}]}
        replicas = Replicas.parse(fields, where="replicas")
        loop.store.save_endpoint(ServeSpec(name="m", model="/m", replicas=replicas), "ana", loop.clock.now_s())
        loop.until(lambda: loop.store.endpoint("m").state is EndpointState.RUNNING)
        loop.store.signals.save("m", {"queue": 35.0}, loop.clock.now_s())
        loop.until(lambda: loop.store.endpoint("m").target_replicas == 4)
        loop.clock.advance(12 * 3600.0)
        loop.store.signals.save("m", {"queue": 0.0}, loop.clock.now_s())
        loop.until(lambda: loop.store.endpoint("m").target_replicas == 2, ticks=100)
        assert loop.store.endpoint("m").spec.replicas == replicas, "the stored spec stays"


class TestMeters:
    def test_a_node_that_is_idle_in_ray_goes_only_when_its_gpus_are_known_to_rest(self, loop: Loop) -> None:
        job = loop.submit(members=1, resources={"GPU": 8.0})
        loop.until(lambda: DriverKey(job, 0) in loop.world.running)
        (node_id,) = loop.world.bought
        loop.finish(job)

        def said(gpu: float, ticks: int = 3) -> str:
            """Returns the wait that is reported after so many ticks in which the exporter gives this use."""
            for _ in range(ticks):
                loop.world.use[node_id] = {"gpu": Signal(gpu, loop.clock.now_s())}
                loop.tick()
            return waits()

        def waits() -> str:
            assert not loop.nothing_runs()
            (wait,) = loop.controller.tick().actions
            assert isinstance(wait, Wait) and (wait.subject, wait.constraint) == (node_id, "signal")
            return wait.reason

        loop.tick(14)
        assert "never measured" in waits()
        assert "in use" in said(0.97)
        assert "only since" in said(0.0)
        loop.tick(24)
        assert "last measured at" in waits(), "its exporter stopped while it rested: nobody knows what it does now"
        for _ in range(20):
            loop.world.use[node_id] = {"gpu": Signal(0.0, loop.clock.now_s())}
            loop.tick()
        loop.until(loop.nothing_runs)
        loop.check_ledger()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(fuses=st.lists(st.integers(min_value=0, max_value=8), min_size=1, max_size=10), reclaim=st.booleans())
def test_killed_at_any_call_it_loses_no_job_leaks_no_node_and_books_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, fuses: list[int], reclaim: bool
) -> None:
    loop = Loop(tmp_path_factory.mktemp("loop"))
    job = loop.submit(labels={"ray.io/market-type": "spot"})
    for fuse in fuses:
        loop.world.fuse = fuse
        loop.tick(4)
    loop.world.fuse = None
    loop.until(lambda: loop.state(job) is JobState.RUNNING)
    if reclaim:
        lease = loop.store.lease_of(job)
        assert lease is not None
        loop.world.fuse = fuses[0]
        loop.world.end(lease.members[0].node_id, "reclaimed")
        loop.store.report(job, {"lost_s": 2.0, "lost_at_s": loop.clock.now_s()}, loop.clock.now_s())
        loop.tick(6)
    loop.until(lambda: DriverKey(job, 0) in loop.world.running)
    loop.finish(job)
    loop.until(lambda: loop.state(job) is JobState.SUCCEEDED)
    loop.until(loop.nothing_runs)
    loop.tick(2)
    assert len(loop.world.launches) == len(set(loop.world.launches)) <= 2 + reclaim
    assert set(loop.world.running) == {DriverKey(job, 0)}
    spans = [(e.node_id, e.from_us) for e in loop.store.books.entries() if e.kind is EntryKind.WASTE and e.subject]
    assert len(spans) == len(set(spans)) and bool(spans) == reclaim
    loop.check_ledger()
    loop.store.close()
