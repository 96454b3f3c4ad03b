"""A small cluster for the queue's tests: snapshots from few words, and a loop that applies what the queue decides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from raytide.control.reconcile.decide import with_leases
from raytide.control.views import Waiting
from raytide.core.objects.gang import GangSpec, Lease, LeaseState, Member, MemberState, Shape
from raytide.core.objects.job import Job, JobSpec, JobState
from raytide.core.objects.node import Node, NodeState, NodeType, minus
from raytide.core.objects.plan import Action, Admit, Plan, Preempt, Shrink, Wait
from raytide.core.objects.snapshot import MarketConstraint, NodeView, Snapshot
from raytide.core.objects.team import Team, TeamSpec
from raytide.queue.admission.scheduler import schedule
from raytide.queue.admission.start_forecast import forecast_starts
from raytide.queue.lifecycle import jobs, leases

H100 = NodeType(
    name="h100x8",
    resources={"CPU": 64.0, "GPU": 8.0},
    labels={"ray.io/accelerator-type": "H100"},
    price_micro_usd_h=80_000_000,
    max_nodes=2,
)


def gpus(each: float, members: int = 1, at_least: int | None = None, **labels: str) -> Shape:
    return Shape(members=members, min_members=at_least, resources={"GPU": each}, labels=labels)


def spec(*shapes: Shape, kind: str = "train", team: str = "blue", **more: object) -> JobSpec:
    return JobSpec.parse(
        {"kind": kind, "name": "j", "team": team, "gang": GangSpec(shapes=shapes or (gpus(1),)).model_dump(), **more},
        where="job",
    )


def job(
    number: int, *shapes: Shape, state: JobState = JobState.QUEUED, at_s: float | None = None, **more: object
) -> Job:
    """`more` goes into the spec."""
    submitted_s = float(number) if at_s is None else at_s
    return Job(f"job-{number}", spec(*shapes, **more), "ada", state, submitted_s)  # type: ignore[arg-type]


def team(name: str, spent_usd: float = 0.0, **more: object) -> Team:
    return Team(name, TeamSpec.parse(more, where=name), spent_micro_usd=round(spent_usd * 1e6))


@dataclass
class Cluster:
    """Nodes that are always ready, and jobs that hold what they were admitted to. Time moves by `step`."""

    node_type: NodeType = H100
    nodes: int = 2
    """All that there are, and no more can be bought."""
    teams: tuple[Team, ...] = ()
    now_s: float = 1000.0
    jobs: dict[str, Job] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    spent: dict[str, int] = field(default_factory=dict)
    stances: dict[str, MarketConstraint] = field(default_factory=dict)
    admissions: list[tuple[float, str]] = field(default_factory=list)

    def submit(self, *shapes: Shape, **more: object) -> str:
        made = job(len(self.jobs) + 1, *shapes, at_s=self.now_s, **more)
        self.jobs[made.id] = made
        return made.id

    @property
    def snapshot(self) -> Snapshot:
        live = tuple(lease for lease in self.leases.values() if lease.state is not LeaseState.RELEASED)
        return Snapshot(
            at_s=self.now_s,
            node_types=(self.node_type.model_copy(update={"max_nodes": self.nodes}),),
            nodes=tuple(self._view(number, live) for number in range(1, self.nodes + 1)),
            jobs=tuple(job for job in self.jobs.values() if not job.is_final),
            leases=live,
            teams=self.teams,
            spent=self.spent,
            stances=self.stances,
            next_node=self.nodes + 1,
            next_lease=len(self.leases) + 1,
        )

    def step(self, seconds: float = 0.0) -> tuple[Action, ...]:
        """Advances the clock, decides and applies; members become usable at once where there is room."""
        self.now_s += seconds
        self._follow()
        seen = self.snapshot
        actions = schedule(seen)
        for lease in with_leases(seen, actions).leases:
            self.leases[lease.id] = lease
        for action in actions:
            if isinstance(action, Admit):
                self.jobs[action.job_id] = jobs.admitted(
                    self.jobs[action.job_id], action.reason, self.now_s, action.reserved_micro_usd
                )
                self.admissions.append((self.now_s, action.job_id))
            elif isinstance(action, Preempt):
                self.jobs[action.job_id] = replace(self.jobs[action.job_id], reason=action.reason)
        self._seat()
        self._follow()
        return actions

    def end(self, job_id: str) -> None:
        job = replace(self.jobs[job_id], state=JobState.SUCCEEDED, ended_at_s=self.now_s)
        self.jobs[job_id], lease = jobs.advance(job, self.lease(job_id), None, self.now_s, silent_s=None)
        if lease is not None:
            self.leases[lease.id] = lease

    def lease(self, job_id: str) -> Lease | None:
        return next(
            (x for x in self.leases.values() if x.job_id == job_id and x.state is not LeaseState.RELEASED), None
        )

    def held(self, job_id: str) -> int:
        """Members that it can use."""
        lease = self.lease(job_id)
        return 0 if lease is None else len(lease.usable)

    def running(self) -> dict[str, int]:
        return {job_id: self.held(job_id) for job_id in self.jobs if self.held(job_id)}

    def free(self, number: int) -> Mapping[str, float]:
        return self._view(number, tuple(self.leases.values())).available

    def _view(self, number: int, live: Iterable[Lease]) -> NodeView:
        node_type = self.node_type
        node = Node(
            f"node-{number}", node_type.name, "local", node_type.market, node_type.price_micro_usd_h,
            NodeState.READY, 0.0, ray_node_id=f"ray-{number}",
        )  # fmt: skip
        free: Mapping[str, float] = node_type.resources
        for lease in live:
            for member in lease.members:
                if member.node_id == node.id and member.is_usable and lease.state is not LeaseState.RELEASED:
                    free = minus(free, lease.shape.resources)
        return NodeView(node, node_type.resources, free, node_type.all_labels("local"))

    def _follow(self) -> None:
        there = {f"node-{n}": self._view(n, ()).node for n in range(1, self.nodes + 1)}
        for lease in tuple(self.leases.values()):
            self.leases[lease.id] = leases.advance(lease, there, {}, self.now_s)
        for job_id in tuple(self.jobs):
            self.jobs[job_id], after = jobs.advance(
                self.jobs[job_id], self.lease(job_id), None, self.now_s, silent_s=None
            )
            if after is not None:
                self.leases[after.id] = after

    def _seat(self) -> None:
        """All that a gang needs at once, or nothing."""
        from raytide.scheduling.diagnosis import Unschedulable
        from raytide.scheduling.state import SchedulingState

        for lease in tuple(self.leases.values()):
            waiting = [member for member in lease.members if member.state is MemberState.WAITING]
            if lease.state is LeaseState.RELEASED or not waiting:
                continue
            needed = max(0, lease.shape.at_least - lease.member_count)
            room = SchedulingState.from_snapshot(replace(self.snapshot, node_types=()))
            placed = room.place(lease.shape, len(waiting), at_least=needed, subject=lease.job_id, menu=())
            if isinstance(placed, Unschedulable):
                continue
            seats = dict(zip((member.index for member in waiting), placed, strict=False))
            members = tuple(_ready(m, seats[m.index].node_id) if m.index in seats else m for m in lease.members)
            state = LeaseState.ACTIVE if sum(m.is_usable for m in members) >= lease.shape.at_least else lease.state
            self.leases[lease.id] = replace(lease, members=members, state=state)


def _ready(member: Member, node_id: str) -> Member:
    ray_node_id = f"ray-{node_id.removeprefix('node-')}"
    return replace(member, state=MemberState.READY, node_id=node_id, ray_node_id=ray_node_id, placement_group_id="pg")


def told(job_id: str, snapshot: Snapshot) -> Waiting | None:
    """The answer of `raytide why` after the next decision; None if the job waits for nothing."""
    from raytide.control.reconcile.decide import waiting_reasons

    return waiting_reasons(snapshot, Plan(snapshot.at_s, schedule(snapshot)), forecast_starts(snapshot)).get(job_id)


def brief(actions: Iterable[Action]) -> list[tuple[str, str]]:
    """The decision for each job."""
    found = []
    for action in actions:
        if isinstance(action, Wait):
            found.append((action.subject, action.constraint))
        elif isinstance(action, Admit | Preempt):
            found.append((action.job_id, type(action).__name__.lower()))
        elif isinstance(action, Shrink):
            found.append((action.job_id, f"shrink {len(action.members)}"))
    return found
