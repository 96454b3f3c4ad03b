"""A live cluster that continues on a virtual clock: its records, a fake provider, and a fake Ray.

The controller's own functions advance the records and make the decisions. Load, tasks and prices stay constant. Every
pool has nodes to sell, and no node is lost.
"""

from __future__ import annotations

from dataclasses import replace

from raytide.autoscaler.nodes import lifecycle
from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.autoscaler.nodes.lifecycle import overdue
from raytide.autoscaler.providers.base import Machine
from raytide.autoscaler.providers.fake import FakeProvider
from raytide.autoscaler.ray_gcs import RayNode
from raytide.control.reconcile.decide import decide
from raytide.control.reconcile.intents import record_intents
from raytide.control.reconcile.observation import ClusterObservation
from raytide.control.reconcile.records import ClusterRecords, advance
from raytide.core.clock import VirtualClock
from raytide.core.objects.gang import LeaseState
from raytide.core.objects.job import Job, JobKind, JobState
from raytide.core.objects.node import Node, NodeState
from raytide.core.objects.plan import Admit, Drain, Launch, Plan
from raytide.core.objects.snapshot import EndpointView, NodeView, Snapshot
from raytide.queue.lifecycle.jobs import DriverKey, DriverStatus
from raytide.simulate.live.ray import LiveRay


class LiveWorld:
    """Simulates a live cluster: provider, Ray and controller on a virtual clock.

    `step` advances the clock and runs one tick of the controller.
    """

    def __init__(self, seen: Snapshot, *, launch_s: float, job_s: float | None) -> None:
        self._seen, self._job_s = seen, job_s
        self.clock = VirtualClock(seen.at_s)
        self.book = ClusterRecords(
            jobs={job.id: _awaited(job) for job in seen.jobs},
            leases={lease.id: lease for lease in seen.leases},
            nodes={view.node.id: view.node for view in seen.nodes},
            endpoints={view.endpoint.name: view.endpoint for view in seen.endpoints},
            pools={(pool.node_type, pool.zone): pool for pool in seen.pools},
            next_node=seen.next_node,
            next_lease=seen.next_lease,
        )
        self.provider = FakeProvider(self.clock, launch_delay_s=launch_s)
        for node in self.book.nodes.values():
            if node.started_at_s is not None:
                bought = Machine(node.id, node.type, node.zone, node.price_micro_usd_h, node.started_at_s)
                self.provider.adopt(bought)
        for quote in seen.quotes:
            if quote.price_micro_usd_h is not None:
                self.provider.set_price(quote.node_type, quote.zone, quote.price_micro_usd_h)
        self._ray = LiveRay(seen)
        self._worth = {view.endpoint.name: view.worth for view in seen.endpoints}
        self._types = {node_type.name: node_type for node_type in seen.node_types}
        self._views = {view.node.id: replace(view, busy=self._held(view)) for view in seen.nodes}
        self._idle = IdleClock({name: seen.at_s - view.idle_s for name, view in self._views.items() if view.idle_s})
        self._draining = {node_id for node_id, view in self._views.items() if view.is_draining}
        self._left: dict[str, RayNode] = {}

    def step(self, seconds: float) -> Plan:
        self.clock.advance(seconds)
        now_s, book = self.clock.now_s(), self.book
        world = self._look()
        self._idle = self._idle.observe(world.ray_nodes or (), now_s)
        self._leave_seats()
        advance(book, world, now_s)
        plan = decide(self._snapshot(world))
        record_intents(book, plan, self._types)
        book.next_node += sum(isinstance(action, Launch) for action in plan.actions)
        book.next_lease += sum(isinstance(action, Admit) for action in plan.actions)
        self._apply(plan)
        return plan

    def price_micro_usd_h(self) -> int:
        return sum(machine.price_micro_usd_h for machine in self.provider.machines() if machine.ended_at_s is None)

    def _look(self) -> ClusterObservation:
        nodes = [node for node in self.book.nodes.values() if self._is_up(node)]
        nodes = [node if node.ray_node_id else replace(node, ray_node_id=f"ray-{node.id}") for node in nodes]
        self._ray.move(nodes, self.book.leases.values(), self.book.endpoints.values(), self._draining)
        return ClusterObservation(
            machines=self.provider.machines(),
            notices=(),
            ray_nodes=(*self._left.values(), *(self._ray_node(node) for node in nodes)),
            demand=self._ray.demand(),
            groups=self._ray.groups(),
            drivers=self._ended_drivers(),
            loads=self._ray.loads(self.clock.now_s()),
        )

    def _snapshot(self, world: ClusterObservation) -> Snapshot:
        """Returns the live snapshot with all changes of the simulation."""
        book = self.book
        return replace(
            self._seen,
            at_s=self.clock.now_s(),
            nodes=tuple(self._view(node) for node in book.nodes.values() if node.state is not NodeState.GONE),
            jobs=tuple(job for job in book.jobs.values() if not job.is_final),
            leases=tuple(lease for lease in book.leases.values() if lease.state is not LeaseState.RELEASED),
            endpoints=tuple(
                EndpointView(e, world.loads.get(name), self._worth.get(name)) for name, e in book.endpoints.items()
            ),
            demand=world.demand,
            pools=tuple(book.pools.values()),
            next_node=book.next_node,
            next_lease=book.next_lease,
            ray_answers=True,
        )

    def _held(self, view: NodeView) -> str:
        """Returns why the node counts as busy although it is idle in Ray; empty if it does not.

        Work outside Ray is assumed to continue, and missing readings to stay missing.
        """
        node_type = self._types.get(view.node.type)
        if node_type is None or not view.idle_s:
            return ""
        return IdleClock().busy_reason(view.node.id, node_type, view.use, self._seen.at_s)

    def _view(self, node: Node) -> NodeView:
        total = self._ray.total(node)
        if (view := self._views.get(node.id)) is None:
            view = NodeView(node, total, total, self._types[node.type].all_labels(node.zone))
        return replace(
            view,
            node=node,
            available=self._ray.available(node),
            idle_s=self._idle.idle_s(node.id, self.clock.now_s()),
            is_draining=node.id in self._draining,
        )

    def _ray_node(self, node: Node) -> RayNode:
        return RayNode(
            ray_node_id=node.ray_node_id,
            node_id=node.id,
            is_draining=node.id in self._draining,
            total=self._ray.total(node),
            available=self._ray.available(node),
        )

    def _is_up(self, node: Node) -> bool:
        """Returns whether the node is in Ray: a joined node until it ends, a new node once it has started."""
        if node.id in self._left or node.state in (NodeState.REQUESTED, NodeState.TERMINATING, NodeState.GONE):
            return False
        return node.ready_at_s is not None or self.provider.is_up(node.id)

    def _leave_seats(self) -> None:
        """Marks the last step's preemptions as settled, because trainers have left their nodes by now."""
        for lease in self.book.leases.values():
            if (job := self.book.jobs.get(lease.job_id)) is not None and job.spec.kind is JobKind.TRAIN:
                self.book.jobs[job.id] = replace(job, progress={**job.progress, "settled": lease.version})

    def _ended_drivers(self) -> dict[DriverKey, DriverStatus]:
        """Returns the drivers of jobs that have run for the assumed time, as succeeded. Drivers of gangs release their
        leases.
        """
        done = {}
        for job in tuple(self.book.jobs.values()):
            if self._job_s is None or job.state is not JobState.RUNNING or job.started_at_s is None:
                continue
            if self.clock.now_s() < job.started_at_s + self._job_s:
                continue
            key = DriverKey(job.id, job.restarts)
            done[key] = DriverStatus(key, "succeeded")
            if job.spec.kind is JobKind.GANG:
                self.book.jobs[job.id] = replace(job, released_by_driver="")
        return done

    def _apply(self, plan: Plan) -> None:
        due = overdue(self.book.nodes.values(), self.provider.machines())
        for node in due.launch:
            self.provider.launch(node, self._types[node.type])
        for node_id in due.terminate:
            self.provider.terminate(node_id)
        for action in plan.actions:
            if isinstance(action, Drain):
                self._drain(action)

    def _drain(self, drain: Drain) -> None:
        """Drains a node. An idle drain is refused if something runs there; otherwise the raylet leaves at once."""
        node = self.book.nodes[drain.node_id]
        if drain.kind == "idle" and self._ray.is_empty(node):
            self.book.nodes[node.id] = lifecycle.drained(node, drain)
            self._left[node.id] = replace(self._ray_node(node), is_alive=False)
        if drain.kind == "notice":
            self._draining.add(node.id)


def _awaited(job: Job) -> Job:
    """Returns the job without its earlier start if it waits, as after a preemption: its next start is forecast."""
    return replace(job, started_at_s=None) if job.state in (JobState.QUEUED, JobState.ADMITTED) else job
