"""The queue under random work: whole gangs or none, no cycles, a bound for the head, quotas within limits."""

from __future__ import annotations

import re

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.queue.cluster import Cluster, gpus, team

from raytide.core.objects.job import JobState
from raytide.core.objects.plan import Action, Admit, Preempt, Shrink, Wait
from raytide.queue.admission import usage
from raytide.queue.admission.priority import ranked, waiting
from raytide.queue.admission.scheduler import GRACE_S, admission_state, queue_table
from raytide.queue.admission.state import AdmissionState
from raytide.queue.lifecycle import attained_service
from raytide.queue.lifecycle.attained_service import MAX_PREEMPTIONS

TICK_S = 15.0
TEAMS = (
    team("org", quota={"GPU": 2}),
    team("blue", parent="org", quota={"GPU": 8}, borrow={"GPU": 6}),
    team("red", parent="org", quota={"GPU": 6}, lend={"GPU": 4}),
    team("free"),
)


class Queue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.c = Cluster(nodes=3, teams=TEAMS)
        self.lasts_s: dict[str, float] = {}
        self.head, self.bound_s = "", 0.0
        self.waited = set[str]()
        """Those who waited for their own quota at the last decision."""

    @rule(
        each=st.sampled_from([1.0, 2.0, 4.0, 8.0]),
        members=st.integers(1, 3),
        spare=st.integers(0, 2),
        may_stop=st.booleans(),
        who=st.sampled_from(["blue", "red", "free"]),
        level=st.sampled_from(["low", "normal", "high"]),
        lasts_s=st.sampled_from([40.0, 200.0, 2000.0]),
    )
    def submit(
        self, each: float, members: int, spare: int, may_stop: bool, who: str, level: str, lasts_s: float
    ) -> None:
        shape = gpus(each, members=members + spare, at_least=members)
        job_id = self.c.submit(shape, team=who, preemptible=may_stop, priority=level)
        self.lasts_s[job_id] = lasts_s

    @precondition(lambda self: self.c.jobs)
    @rule(ticks=st.integers(1, 4))
    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            for job_id in [job_id for job_id in self.c.running() if self._end_s(job_id) <= self.c.now_s]:
                self.c.end(job_id)
            before = dict(self.c.jobs)
            actions = self.c.step(TICK_S)
            for action in actions:
                if isinstance(action, Preempt | Shrink):
                    self._no_cycle(action, before)
            self._lenders_wait_for_nobody(actions)
            self._watch_head(actions)

    @rule()
    def long_runs_count(self) -> None:
        """Hours pass at once, so that bands change."""
        self.c.now_s += 3600.0
        self.head = ""

    @invariant()
    def gangs_are_whole_or_nothing(self) -> None:
        for lease in self.c.leases.values():
            assert len(lease.usable) == 0 or len(lease.usable) >= lease.shape.at_least
        for number in range(1, self.c.nodes + 1):
            assert min(self.c.free(number).values()) >= 0

    @invariant()
    def quotas_are_kept(self) -> None:
        state = admission_state(self.c.snapshot)
        for name in ("org", "blue", "red", "free", ""):
            assert state.quotas.available(name, "GPU") >= -1e-6, name
            assert state.quotas.nonpreemptible_left(name, "GPU") >= -1e-6, name
        assert sum(self._held_by(name) for name in ("org", "blue", "red", "free")) <= 24
        assert self._held_by("blue") <= 8 + 6

    def _held_by(self, name: str) -> float:
        """Usage without yielding members, which already belong to their preemptors."""
        return sum(
            len(usage.retained_members(lease)) * lease.shape.resources["GPU"]
            for lease in self.c.snapshot.leases
            if self.c.jobs[lease.job_id].spec.team == name
        )

    def _lenders_wait_for_nobody(self, actions: tuple[Action, ...]) -> None:
        """Whoever asks for no more than his team's own has it after one round, or had to wait for room, not quota.

        What one decision gives away within a team is its own again in the next.
        """
        before, self.waited = self.waited, set()
        waits = [self.c.jobs[a.subject] for a in actions if isinstance(a, Wait) and a.constraint == "quota"]
        if not waits:
            return
        quotas = admission_state(self.c.snapshot).quotas
        for job in waits:
            need = usage.least_quota(job.spec.gang.shapes[0])
            is_fixed = not attained_service.may_be_preempted(job) or attained_service.in_cooldown(job, self.c.now_s)
            if not is_fixed and quotas.may_reclaim(job.spec.team, need):
                assert job.id not in before
                self.waited.add(job.id)

    def _no_cycle(self, action: Preempt | Shrink, before: dict) -> None:  # type: ignore[type-arg]
        """A preemptor is not in its cool-down, and no job is preempted too often."""
        assert before[action.job_id].preemptions < MAX_PREEMPTIONS
        for by in re.findall(r"job-\d+", action.reason):
            assert not attained_service.in_cooldown(before[by], self.c.now_s), f"{by} pushes {action.job_id}"

    def _watch_head(self, actions: tuple[Action, ...]) -> None:
        """The head of the queue is admitted at the latest when the jobs that it cannot preempt have ended."""
        snapshot = self.c.snapshot
        state = admission_state(snapshot)
        table = queue_table(state)
        order = [state.jobs[row].id for row in ranked(table)]
        first = next((state.jobs[row].id for row in waiting(table, ranked(table))), "")
        constraint = next((a.constraint for a in actions if isinstance(a, Wait) and a.subject == first), "")
        if constraint != "capacity" or attained_service.in_cooldown(self.c.jobs[first], self.c.now_s):
            self.head = ""
        elif first == self.head:
            if not state.may_reclaim(self.c.jobs[first]):  # meanwhile others may have asked for their own
                new = [
                    a.job_id for a in actions if isinstance(a, Admit) and not self._may_be_asked(state, first, a.job_id)
                ]
                self.bound_s = max([self.bound_s, *(self.c.now_s + self.lasts_s[job_id] for job_id in new)])
            assert self.c.now_s <= self.bound_s + GRACE_S + 2 * TICK_S, f"{first} should have started"
        else:
            above = order[: order.index(first)]
            fixed = [j for j in self.c.running() if j in above or not self._may_be_asked(state, first, j)]
            self.head, self.bound_s = first, max(map(self._end_s, fixed), default=self.c.now_s)

    def _may_be_asked(self, state: AdmissionState, first: str, other: str) -> bool:
        able = state.preemptible_teams(self.c.jobs[first])
        return attained_service.may_be_preempted(self.c.jobs[other]) and (
            able is None or self.c.jobs[other].spec.team in able
        )

    def _end_s(self, job_id: str) -> float:
        job = self.c.jobs[job_id]
        assert job.state in (JobState.RUNNING, JobState.ADMITTED)
        left_s = self.lasts_s[job_id] - job.held_for_s(self.c.now_s)
        return self.c.now_s + left_s


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
