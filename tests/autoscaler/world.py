"""A whole cluster in memory: the controller's own pure steps over the fake provider and a Ray that only counts.

The store is a copy of the records, so that a crash is: throw the copy away, or stop in the middle of applying it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from raytide.actors.gang.placement_groups import GroupKey, PlacementGroupInfo, WantedGroup
from raytide.autoscaler.deadlines.jobs import spot_forecasts
from raytide.autoscaler.endpoints.slo_controller import SloController
from raytide.autoscaler.nodes import launch_backoff
from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.ray_gcs import RayNode
from raytide.autoscaler.spot.pool_availability import PoolAvailability
from raytide.autoscaler.spot.pool_risk import PoolRisk
from raytide.control.reconcile.apply import apply
from raytide.control.reconcile.decide import decide
from raytide.control.reconcile.intents import record_intents
from raytide.control.reconcile.observation import ClusterObservation as Look
from raytide.control.reconcile.observation import Sources
from raytide.control.reconcile.records import ClusterRecords, advance, metered, take_snapshot
from raytide.core.clock import VirtualClock
from raytide.core.errors import ClusterError
from raytide.core.objects.cluster_config import ClusterConfig, RaytideSection, UnmanagedSection
from raytide.core.objects.endpoint import Endpoint, EndpointState, ServeSpec
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLoad, Traffic
from raytide.core.objects.gang import GangSpec, LeaseState, MemberState, Shape
from raytide.core.objects.job import Job, JobKind, JobSpec, JobState
from raytide.core.objects.node import Node, NodeState, NodeType, Resources, Signal, Use, fits, labels_match, minus
from raytide.core.objects.plan import Action, Plan, Wait
from raytide.core.objects.snapshot import Demand, Limits, Snapshot
from raytide.scheduling.replicas import replica_selector

CRASH_POINTS = ("before persist", "before apply", "in apply", "before recording")
CrashPoint = Literal["before persist", "before apply", "in apply", "before recording"]


class Crash(BaseException):
    """The controller is gone; not an Exception, so that nobody handles it."""


@dataclass(slots=True, eq=False)
class Work:
    """Something that runs in Ray or waits for a node: a replica, or a task without a lease."""

    resources: Resources
    labels: Mapping[str, str]
    endpoint: str = ""
    node_id: str = ""
    replica: int = 0
    """Its number among several members. They are placed together or not at all."""


class FakeRay:
    """Nodes of machines that are up, minus what groups and work take. Places what waits on any node that it fits."""

    def __init__(self, provider: FakeProvider, types: Mapping[str, NodeType], clock: VirtualClock) -> None:
        self.provider, self.types, self.clock = provider, types, clock
        self.groups: dict[GroupKey, tuple[WantedGroup, str]] = {}
        self.work: list[Work] = []
        self.draining: dict[str, str] = {}
        self.exited: set[str] = set()
        self.is_silent = False
        self.standing_cpus = 0
        """The CPUs that somebody reserved with `request_resources`."""

    def running(self) -> dict[str, Machine]:
        up = {m.node_id: m for m in self.provider.machines() if self.provider.is_up(m.node_id)}
        return {node_id: machine for node_id, machine in up.items() if node_id not in self.exited}

    def used(self, node_id: str) -> list[Resources]:
        ready = [group for group, state in self.groups.values() if state == "ready"]
        groups = [group.resources for group in ready if group.ray_node_id == f"ray-{node_id}"]
        return groups + [work.resources for work in self.work if work.node_id == node_id]

    def free(self, machine: Machine) -> dict[str, float]:
        free = dict(self.types[machine.node_type].resources)
        for taken in self.used(machine.node_id):
            free = minus(free, taken)
        return free

    def step(self) -> None:
        """Lose what was on dead nodes, let drained idle raylets leave, place what waits."""
        self.exited |= {node_id for node_id, kind in self.draining.items() if kind == "idle"}
        up = self.running()
        for key, (group, state) in self.groups.items():
            if state == "ready" and group.ray_node_id.removeprefix("ray-") not in up:
                self.groups[key] = (group, "pending")
        for work in self.work:
            if work.node_id and work.node_id not in up:
                work.node_id = ""
        for key, (group, state) in self.groups.items():
            machine = up.get(group.ray_node_id.removeprefix("ray-"))
            is_open = machine is not None and machine.node_id not in self.draining
            if state == "pending" and machine is not None and is_open and fits(group.resources, self.free(machine)):
                self.groups[key] = (group, "ready")
        for work in self.work:
            fellows = [other for other in self.work if other.replica == work.replica] if work.replica else [work]
            missing = [each for each in fellows if not each.node_id]
            for each in missing:
                each.node_id = next((m.node_id for m in up.values() if self._suits(each, m)), "")
            if not all(each.node_id for each in fellows):
                for each in missing:
                    each.node_id = ""

    def _suits(self, work: Work, machine: Machine) -> bool:
        labels = self.types[machine.node_type].all_labels(machine.zone)
        is_open = machine.node_id not in self.draining
        return is_open and labels_match(work.labels, labels) and fits(work.resources, self.free(machine))

    def nodes(self) -> tuple[RayNode, ...]:
        if self.is_silent:
            raise ClusterError("no answer")
        dead = tuple(RayNode(f"ray-{node_id}", node_id, is_alive=False) for node_id in sorted(self.exited))
        return dead + tuple(
            RayNode(
                ray_node_id=f"ray-{node_id}",
                node_id=node_id,
                is_draining=node_id in self.draining,
                total=self.types[machine.node_type].resources,
                available=self.free(machine),
            )
            for node_id, machine in self.running().items()
        )

    def demand(self) -> tuple[Demand, ...]:
        if self.is_silent:
            raise ClusterError("no answer")
        waiting = tuple(Demand(work.resources, work.labels) for work in self.work if not work.node_id)
        asked = (Demand({"CPU": 1.0}, {}, self.standing_cpus, is_standing=True),) if self.standing_cpus else ()
        return waiting + asked

    def report(self, nodes: object) -> None: ...

    def drain(self, ray_node_id: str, kind: str, deadline_s: float, why: str) -> bool:
        node_id = ray_node_id.removeprefix("ray-")
        if self.is_silent or (kind == "idle" and self.used(node_id)):
            return False
        self.draining.setdefault(node_id, kind)
        return True

    def list(self) -> dict[GroupKey, PlacementGroupInfo]:
        return {key: PlacementGroupInfo(key, state, key.name) for key, (_, state) in self.groups.items()}  # type: ignore[arg-type]

    def create(self, wanted: Iterable[WantedGroup]) -> None:
        for group in wanted:
            self.groups.setdefault(group.key, (group, "pending"))

    def remove(self, groups: Iterable[PlacementGroupInfo]) -> None:
        for group in groups:
            self.groups[group.key] = (self.groups[group.key][0], "removed")


class StrictProvider(FakeProvider):
    """The fake provider, which also watches that nobody breaks a promise, and can crash its caller."""

    world: Cluster
    crash_in: int = -1
    """The call in which the controller dies; -1 for never."""

    asked: Counter[tuple[str, str]]
    """Launches by pool, those included that were refused."""

    def launch(self, node: Node, node_type: NodeType) -> None:
        self._maybe_crash()
        self.asked[node.type, node.zone] += 1
        super().launch(node, node_type)
        running = [m for m in self.machines() if m.node_type == node.type and m.ended_at_s is None]
        assert len(running) <= node_type.max_nodes, f"I2: {len(running)} machines of {node.type}"
        self._maybe_crash()

    def terminate(self, node_id: str) -> None:
        self._maybe_crash()
        record = self.world.book.nodes[node_id]
        is_due = record.drain_deadline_s is not None and record.drain_deadline_s <= self.world.clock.now_s()
        assert is_due or not self.world.ray.used(node_id), f"I1: {node_id} is busy, yet ended: {record.reason}"
        super().terminate(node_id)
        self._maybe_crash()

    def _maybe_crash(self) -> None:
        self.crash_in -= 1
        if self.crash_in == -1:
            raise Crash
        self.crash_in = max(self.crash_in, -1)


@dataclass
class Cluster:
    """`tick` is one pass of the controller; everything else happens to it from outside."""

    node_types: tuple[NodeType, ...]
    unmanaged: UnmanagedSection = field(default_factory=UnmanagedSection)
    launch_delay_s: float = 8.0
    watch: Callable[[Snapshot, tuple[Action, ...]], None] = lambda seen, actions: None
    """Sees every decision that does something."""
    nimble: bool = True
    """True if drivers report that they have left the seats that were taken from them."""

    def __post_init__(self) -> None:
        self.types = {t.name: t for t in self.node_types}
        self.clock = VirtualClock(1_000.0)
        self.provider = StrictProvider(self.clock, launch_delay_s=self.launch_delay_s)
        self.provider.world, self.provider.asked = self, Counter()
        self.ray = FakeRay(self.provider, self.types, self.clock)
        self.book = ClusterRecords()
        self.idle, self.risk, self.spot, self.limits = IdleClock(), PoolRisk(), PoolAvailability(), Limits()
        self.fleets = SloController()
        self.ongoing: dict[str, float] = {}
        self.started = 0
        """Replicas."""
        self.traffic: dict[str, Traffic] = {}
        """Known traffic and speed of endpoints."""
        self.silent: set[str] = set()
        self.loads: dict[str, EndpointLoad] = {}
        self.gpu_use: dict[str, float] = {}
        """The use of nodes on which something works beside Ray."""
        self.mute: set[str] = set()
        """Nodes whose meters say nothing more."""
        self.use: dict[str, Use] = {}
        settings = RaytideSection(node_types={}, unmanaged=self.unmanaged)
        self.config = ClusterConfig(name="test", node_types=self.node_types, settings=settings)
        self.seen = Snapshot(at_s=self.clock.now_s(), node_types=self.node_types)

    def submit(self, *shapes: Shape, form_timeout_s: float = 60.0, **more: object) -> str:
        """`more` goes into the job's spec."""
        number = len(self.book.jobs) + 1
        gang = GangSpec(shapes=shapes, form_timeout_s=form_timeout_s)
        spec = JobSpec.parse({"kind": JobKind.GANG, "name": "g", "gang": gang, **more}, where="job")
        job = Job(f"job-{number}", spec, "me", JobState.QUEUED, self.clock.now_s())
        self.book.jobs[job.id] = job
        return job.id

    def finish(self, job_id: str) -> None:
        self.book.jobs[job_id] = replace(self.book.jobs[job_id], stop_requested=True)

    def serve(self, spec: ServeSpec, ongoing: float = 0.0) -> None:
        now_s = self.clock.now_s()
        endpoint = Endpoint(spec, "me", EndpointState.RUNNING, now_s, target_replicas=spec.replicas.min)
        self.book.endpoints[spec.name] = endpoint
        self.ongoing[spec.name] = ongoing

    def run_task(self, resources: Resources, labels: Mapping[str, str] | None = None) -> Work:
        work = Work(resources, labels or {})
        self.ray.work.append(work)
        return work

    def tick(self, dt_s: float = 1.0, crash: CrashPoint | None = None, crash_in: int = 0) -> tuple[Action, ...]:
        """Time passes, the world moves, the controller makes one pass, or a part of one."""
        self.clock.advance(dt_s)
        self._serve_steps()
        self.ray.step()
        self._replicas_speak()
        if crash:
            self.idle, self.risk, self.spot, self.fleets = IdleClock(), PoolRisk(), PoolAvailability(), SloController()
        now_s = self.clock.now_s()
        book, look = _loaded(self.book), self._look()
        self._keep_jobs(book, now_s)
        if look.ray_nodes is not None:
            self.idle = self.idle.observe(look.ray_nodes, now_s)
        self._meters_speak(book, now_s - dt_s, now_s)
        book.next_node = 1 + max((int(n.removeprefix("node-")) for n in book.nodes), default=0)
        book.next_lease = 1 + max((int(n.removeprefix("lease-")) for n in book.leases), default=0)
        advance(book, look, now_s)
        self.risk.observe(book.nodes.values(), now_s)
        quotes = self.risk.quotes(self.node_types, self.provider.prices(), now_s)
        self.seen = take_snapshot(book, look, self.idle, self.config, now_s)
        self.spot.observe(book.nodes.values(), now_s)
        spot = spot_forecasts(self.spot, self.seen)
        seen = replace(self.seen, quotes=quotes, spot=spot, limits=self.limits)
        self.seen = self.fleets.with_replica_values(seen, self.risk.hazard)
        plan = decide(self.seen)
        if any(not isinstance(action, Wait) for action in plan.actions):
            self.watch(self.seen, plan.actions)
        record_intents(book, plan, self.types)
        if crash == "before persist":
            return ()
        self.book = book
        self.check_records()
        if crash != "before apply":
            self._apply(plan, look, crash, crash_in)
        return plan.actions

    def settle(self, ticks: int, dt_s: float = 1.0) -> list[Action]:
        """The deeds (not: waits) of that many passes."""
        return [a for _ in range(ticks) for a in self.tick(dt_s) if not isinstance(a, Wait)]

    def machines(self) -> list[Machine]:
        return [machine for machine in self.provider.machines() if machine.ended_at_s is None]

    def check_records(self) -> None:
        """I3: of a gang of which nothing stands yet, all that it needs have a node or none has, once Ray is heard."""
        if not self.seen.ray_answers:
            return
        for lease in self.book.leases.values():
            if lease.state is LeaseState.RELEASED or any(
                m.is_usable or m.state is MemberState.FORMING for m in lease.members
            ):
                continue
            seated = sum(member.state is MemberState.ASSIGNED for member in lease.members)
            assert seated == 0 or seated >= lease.shape.at_least, f"I3: {lease}"

    def check_no_leak(self) -> None:
        """I13: what runs has a record that wants it, and what should run does."""
        running = {machine.node_id for machine in self.machines()}
        live = (NodeState.LAUNCHING, NodeState.READY, NodeState.DRAINING)
        wanted = {node.id for node in self.book.nodes.values() if node.state in live}
        assert running == wanted, (running, wanted)

    def _apply(self, plan: Plan, look: Look, crash: CrashPoint | None, crash_in: int) -> None:
        self.provider.crash_in = crash_in if crash == "in apply" else -1
        nothing = _Nothing()
        sources = Sources(self.provider, self.ray, self.ray, nothing, nothing, nothing, nothing)  # type: ignore[arg-type]
        try:
            outcome = apply(self.book, plan, look, sources, self.types, plan.at_s)
        except Crash:
            return
        finally:
            self.provider.crash_in = -1
        if crash == "before recording":
            return
        before = [self.book.nodes[node_id] for node_id in outcome.nodes]
        for pool in launch_backoff.update_pools(
            tuple(self.book.pools.values()), before, outcome.nodes.values(), plan.at_s
        ):
            self.book.pools[(pool.node_type, pool.zone)] = pool
        self.book.nodes.update(outcome.nodes)

    def _look(self) -> Look:
        return Look(
            machines=self.provider.machines(),
            notices=self.provider.notices(),
            ray_nodes=None if self.ray.is_silent else self.ray.nodes(),
            demand=() if self.ray.is_silent else self.ray.demand(),
            groups=None if self.ray.is_silent else self.ray.list(),
            drivers={},
            loads={name: self.loads.get(name) for name in self.book.endpoints},
            use=self.use,
        )

    def _meters_speak(self, book: ClusterRecords, since_s: float, now_s: float) -> None:
        """Every five seconds, and now."""
        nodes = metered(book, self.types)
        for at_s in (*range(ceil(since_s), ceil(now_s), 5), now_s):
            for node_id in nodes.keys() - self.mute:
                self.use[node_id] = {"gpu": Signal(self.gpu_use.get(node_id, 0.0), at_s)}
            self.idle = self.idle.observe_meters(self.use, nodes)

    def _keep_jobs(self, book: ClusterRecords, now_s: float) -> None:
        """Every driver asks for its lease all the time, and has left by now what the last pass took from it."""
        versions = {lease.job_id: lease.version for lease in book.leases.values()}
        for job in tuple(book.jobs.values()):
            told = {"settled": versions[job.id]} if job.id in versions and self.nimble else {}
            book.jobs[job.id] = replace(job, heartbeat_at_s=now_s, progress=told)

    def _serve_steps(self) -> None:
        """Serve starts and stops replicas until there are as many as published."""
        for name, endpoint in self.book.endpoints.items():
            replicas = [work for work in self.ray.work if work.endpoint == name]
            leaving = [r for r in replicas if r.node_id in self.ray.draining]
            members, target = endpoint.spec.members, endpoint.target_replicas * endpoint.spec.members
            for number in range(target - len(replicas) + len(leaving)):
                self.started += number % members == 0
                self.ray.work.append(
                    Work(
                        endpoint.spec.resources,
                        replica_selector(endpoint.spec),
                        name,
                        replica=self.started if members > 1 else 0,
                    )
                )
            seated = [r for r in replicas if r.node_id and r not in leaving]
            surplus = [r for r in replicas if r not in leaving][target:]
            for gone in surplus + (leaving if len(seated) >= target else []):
                self.ray.work.remove(gone)

    def _replicas_speak(self) -> None:
        """Like the controller, which asks Serve after Ray: where they are, unless they are silent."""
        now_s = self.clock.now_s()
        for name in self.book.endpoints:
            if name not in self.silent:
                nodes = tuple(f"ray-{w.node_id}" for w in self.ray.work if w.endpoint == name and w.node_id)
                first = nodes[:: self.book.endpoints[name].spec.members]
                spoke = tuple(ReplicaLoad(str(number), now_s, node=node) for number, node in enumerate(first))
                traffic = self.traffic.get(name)
                self.loads[name] = EndpointLoad(now_s, self.ongoing[name], len(first), nodes, spoke, traffic)


def _loaded(book: ClusterRecords) -> ClusterRecords:
    """The records are frozen, so copies of their tables are enough."""
    return replace(
        book,
        jobs=dict(book.jobs),
        leases=dict(book.leases),
        nodes=dict(book.nodes),
        endpoints=dict(book.endpoints),
        pools=dict(book.pools),
    )


class _Nothing:
    """No drivers run here and no endpoint is deployed: `_serve_steps` plays Serve."""

    def statuses(self) -> dict[str, str]:
        return {}
