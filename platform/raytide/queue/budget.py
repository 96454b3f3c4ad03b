"""Budgets of teams and jobs. A job reserves budget at its admission, and its real cost replaces the reservation.

The reservation is the price of the job's gang for an hour. It counts as spent, so that jobs which are admitted together
cannot overdraw a budget. Preemptible jobs are preempted shortly before a hard limit is reached, early enough to write
their checkpoints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raytide.core.money import format_usd, micro_usd
from raytide.core.objects.job import Job
from raytide.core.objects.team import Team, TeamSpec
from raytide.scheduling.diagnosis import Unschedulable

RESERVE_S = 3600.0
LEAD_S = 180.0
"""The seconds before a limit is reached at which jobs are preempted: time for checkpoints, and for costs that are not
booked yet.
"""


@dataclass(slots=True, eq=False)
class Budgets:
    specs: Mapping[str, TeamSpec]
    spent: Mapping[str, int]
    """The total cost by job."""
    spent_month: Mapping[str, int] = field(default_factory=dict)
    """This month's cost, for jobs with a monthly budget, by job."""
    has_soft: bool = True
    has_hard: bool = True
    committed: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The cost spent this month plus the amount reserved and not spent yet, by team and including the teams below
    it."""
    version: int = 0
    """A number that grows whenever a commitment may change an answer."""

    @classmethod
    def of(
        cls,
        teams: Iterable[Team],
        jobs: Iterable[Job],
        spent: Mapping[str, int],
        spent_month: Mapping[str, int] | None = None,
    ) -> Budgets:
        teams = tuple(teams)
        has_soft = any(team.spec.budget.soft_usd is not None for team in teams)
        has_hard = any(team.spec.budget.hard_usd is not None for team in teams)
        budgets = cls({team.name: team.spec for team in teams}, spent, spent_month or {}, has_soft, has_hard)
        for team in teams:
            budgets._commit(team.name, team.spent_micro_usd)
        for job in jobs:
            budgets._commit(job.spec.team, budgets.outstanding(job))
        return budgets

    def outstanding(self, job: Job) -> int:
        return max(0, job.reserved_micro_usd - self.spent.get(job.id, 0))

    def over_soft_limit(self, job: Job) -> str:
        """Returns the job's id if the job is beyond its own soft limit. Otherwise checks the job's team, and then the
        team's ancestors from the parent up. Returns `team NAME` for the first of these teams that is beyond its soft
        limit, or "" if there is none.
        """
        own_usd = job.spec.soft_budget_usd
        if own_usd is not None and _reached(self._cost(job), own_usd):
            return job.id
        if not self.has_soft:
            return ""
        ancestors = self._ancestors(job.spec.team)
        reached = (name for name in ancestors if _reached(self.committed[name], self.specs[name].budget.soft_usd))
        return next((f"team {name}" for name in reached), "")

    def has_limit(self, job: Job) -> bool:
        """Returns True if a budget could ever cause the job's preemption."""
        limited = self.has_hard and any(
            self.specs[name].budget.hard_usd is not None for name in self._ancestors(job.spec.team)
        )
        return limited or job.spec.budget_usd is not None

    def refusal(self, job: Job, micro_usd_h: float) -> Unschedulable | None:
        """Returns the reason why the budgets refuse the job's next hour at this price. Returns None if they allow
        it.
        """
        if job.spec.budget_usd is None and not self.has_hard:
            return None
        need = self._reservation(job, micro_usd_h)
        spent, own = self._cost(job), job.spec.budget_usd
        if own is not None and (_reached(spent, own) or (need <= 0 and micro_usd_h > 0)):
            remaining = "" if _reached(spent, own) else "; less than three minutes of it are left"
            limit = f"{job.id} has cost {format_usd(spent)} of its budget of {_describe_budget(job)}{remaining}."
            is_monthly = job.spec.budget_per == "month"
            remedy = f"`raytide budget set {job.id} USD{'/month' if is_monthly else ''}`."
            wait = "Wait for the next month, or give" if is_monthly else "Give"
            return Unschedulable("budget", limit, f"{wait} it more: {remedy}")
        # With less left, `jobs_over_budget` would preempt the job at once.
        least = max(need, math.floor(_lead(micro_usd_h)) + 1)
        for name in self._ancestors(job.spec.team):
            hard = self.specs[name].budget.hard_usd
            if hard is not None and self.committed[name] + least > micro_usd(hard):
                reason = (
                    f"team {name} has spent or reserved {format_usd(self.committed[name])} of ${hard:g} this month; "
                    f"an hour of this job is {format_usd(need)}."
                )
                remedy = f"Wait for the next month, or raise it: `raytide budget set {name} USD`."
                return Unschedulable("budget", reason, remedy)
        return None

    def may_grow(self, job: Job, held_micro_usd_h: float, more_micro_usd_h: float) -> bool:
        """Returns True if the job's own budget covers an hour of the grown gang. If it does not, growing would soon
        cause the job's preemption.
        """
        if job.spec.budget_usd is None or more_micro_usd_h <= 0:
            return True
        whole = held_micro_usd_h + more_micro_usd_h
        hour = whole * RESERVE_S / 3600.0
        return self._cost(job) + hour + _lead(whole) <= micro_usd(job.spec.budget_usd)

    def reserve(self, job: Job, micro_usd_h: float) -> int:
        """Reserves the cost of the job's next hour. Returns the job's total cost so far plus this reservation, in
        micro-dollars.
        """
        need = self._reservation(job, micro_usd_h)
        self._commit(job.spec.team, need)
        return self.spent.get(job.id, 0) + need

    def jobs_over_budget(self, jobs: Mapping[str, tuple[Job, float]], teams: Iterable[Team]) -> dict[str, str]:
        """Returns the jobs that must be preempted now because a budget is nearly spent. The result maps the id of such
        a job to the reason.

        `jobs` maps a job's id to a pair: the job, and its price in micro-dollars an hour.
        """
        burn: defaultdict[str, float] = defaultdict(float)
        spent: defaultdict[str, int] = defaultdict(int)
        for team in teams:
            for name in self._ancestors(team.name):
                spent[name] += team.spent_micro_usd
        for job, micro_usd_h in jobs.values():
            for name in self._ancestors(job.spec.team):
                burn[name] += micro_usd_h
        found = {}
        for job, micro_usd_h in jobs.values():
            if job.spec.budget_usd is not None and _is_nearly_spent(self._cost(job), micro_usd_h, job.spec.budget_usd):
                found[job.id] = f"its budget of {_describe_budget(job)} is spent"
            for name in self._ancestors(job.spec.team):
                if _is_nearly_spent(spent[name], burn[name], hard := self.specs[name].budget.hard_usd):
                    found[job.id] = f"the budget of team {name}, ${hard:g} this month, is spent"
        return found

    def _reservation(self, job: Job, micro_usd_h: float) -> int:
        hour = round(micro_usd_h * RESERVE_S / 3600.0)
        if job.spec.budget_usd is None:
            return hour
        return min(hour, micro_usd(job.spec.budget_usd) - self._cost(job) - round(_lead(micro_usd_h)))

    def _cost(self, job: Job) -> int:
        """Returns the job's cost so far that its own budget limits, in micro-dollars: in total, or in this month."""
        return (self.spent if job.spec.budget_per == "job" else self.spent_month).get(job.id, 0)

    def _commit(self, team: str, amount: int) -> None:
        for name in self._ancestors(team) if amount else ():
            self.committed[name] += amount
        self.version += self.has_soft or self.has_hard

    def _ancestors(self, team: str) -> list[str]:
        """Returns the team and its ancestors."""
        ancestors = []
        while team in self.specs:
            ancestors.append(team)
            team = self.specs[team].parent
        return ancestors


def _describe_budget(job: Job) -> str:
    return f"${job.spec.budget_usd:g}{' this month' if job.spec.budget_per == 'month' else ''}"


def _reached(amount: int, limit_usd: float | None) -> bool:
    return limit_usd is not None and amount >= micro_usd(limit_usd)


def _is_nearly_spent(spent: int, micro_usd_h: float, limit_usd: float | None) -> bool:
    return limit_usd is not None and spent + _lead(micro_usd_h) >= micro_usd(limit_usd)


def _lead(micro_usd_h: float) -> float:
    return micro_usd_h * LEAD_S / 3600.0
