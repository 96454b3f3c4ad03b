"""Budgets: what may be spent is reserved when a job is admitted and settled by what it costs. Pure.

A job reserves an hour of its gang's price. What it has reserved and not spent yet counts as spent, so jobs that are
admitted together cannot together overdraw. Before a hard limit is reached, early enough for the checkpoints, what may
be preempted gives way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raytide.core.money import format_usd, micro_usd
from raytide.core.objects.job import Job
from raytide.core.objects.team import Team, TeamSpec
from raytide.scheduling.diagnosis import Unschedulable

RESERVE_S = 3600.0
LEAD_S = 180.0
"""How long before a limit is reached its jobs begin to give way: for the checkpoint, and what is not booked yet."""


@dataclass(slots=True, eq=False)
class Budgets:
    specs: Mapping[str, TeamSpec]
    spent: Mapping[str, int]
    """By job, all that it cost."""
    spent_month: Mapping[str, int] = field(default_factory=dict)
    """And this month: those whose budget is by the month."""
    has_soft: bool = True
    """Whether any team has a soft limit."""
    has_hard: bool = True
    """Whether any has a hard one."""
    committed: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By team, its children included: spent this month, and reserved and not spent yet."""
    version: int = 0
    """Grows whenever what is committed may make a difference."""

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
        purse = cls({team.name: team.spec for team in teams}, spent, spent_month or {}, has_soft, has_hard)
        for team in teams:
            purse._commit(team.name, team.spent_micro_usd)
        for job in jobs:
            purse._commit(job.spec.team, purse.outstanding(job))
        return purse

    def outstanding(self, job: Job) -> int:
        return max(0, job.reserved_micro_usd - self.spent.get(job.id, 0))

    def beyond_soft(self, job: Job) -> str:
        """Who is beyond a soft limit: the job itself, its team, or one above it; "" when nobody is."""
        own_usd = job.spec.soft_budget_usd
        if own_usd is not None and _reached(self._counted(job), own_usd):
            return job.id
        if not self.has_soft:
            return ""
        line = self._line(job.spec.team)
        reached = (name for name in line if _reached(self.committed[name], self.specs[name].budget.soft_usd))
        return next((f"team {name}" for name in reached), "")

    def is_limited(self, job: Job) -> bool:
        """Whether anything may make it give way for what it costs."""
        limited = self.has_hard and any(
            self.specs[name].budget.hard_usd is not None for name in self._line(job.spec.team)
        )
        return limited or job.spec.budget_usd is not None

    def refuses(self, job: Job, micro_usd_h: float) -> Unschedulable | None:
        """Why the job may not reserve its next hour at this price."""
        if job.spec.budget_usd is None and not self.has_hard:
            return None
        need = self._reservation(job, micro_usd_h)
        if job.spec.budget_usd is not None and need <= 0 and micro_usd_h > 0:
            spent = self._counted(job)
            left = "" if _reached(spent, job.spec.budget_usd) else "; less than three minutes of it are left"
            limit = f"{job.id} has cost {format_usd(spent)} of its budget of {_words(job)}{left}."
            is_monthly = job.spec.budget_per == "month"
            remedy = f"`raytide budget set {job.id} USD{'/month' if is_monthly else ''}`."
            wait = "Wait for the next month, or give" if is_monthly else "Give"
            return Unschedulable("budget", limit, f"{wait} it more: {remedy}")
        for name in self._line(job.spec.team):
            hard = self.specs[name].budget.hard_usd
            if hard is not None and self.committed[name] + need > micro_usd(hard):
                reason = (
                    f"team {name} has spent or reserved {format_usd(self.committed[name])} of ${hard:g} this month; "
                    f"an hour of this job is {format_usd(need)}."
                )
                remedy = f"Wait for the next month, or raise it: `raytide budget set {name} USD`."
                return Unschedulable("budget", reason, remedy)
        return None

    def may_grow(self, job: Job, held_micro_usd_h: float, more_micro_usd_h: float) -> bool:
        """Whether its own budget lasts for an hour of all its members, lest a job gives way whole for having grown."""
        if job.spec.budget_usd is None or more_micro_usd_h <= 0:
            return True
        whole = held_micro_usd_h + more_micro_usd_h
        hour = whole * RESERVE_S / 3600.0
        return self._counted(job) + hour + _lead(whole) <= micro_usd(job.spec.budget_usd)

    def reserve(self, job: Job, micro_usd_h: float) -> int:
        """Commit the job's next hour. What it may have cost in all by then is returned, for its record."""
        need = self._reservation(job, micro_usd_h)
        self._commit(job.spec.team, need)
        return self.spent.get(job.id, 0) + need

    def jobs_over_budget(self, jobs: Mapping[str, tuple[Job, float]], teams: Iterable[Team]) -> dict[str, str]:
        """Which of the jobs (with what each costs an hour) must give way now, and why."""
        burn: defaultdict[str, float] = defaultdict(float)
        spent: defaultdict[str, int] = defaultdict(int)
        for team in teams:
            for name in self._line(team.name):
                spent[name] += team.spent_micro_usd
        for job, micro_usd_h in jobs.values():
            for name in self._line(job.spec.team):
                burn[name] += micro_usd_h
        found = {}
        for job, micro_usd_h in jobs.values():
            if job.spec.budget_usd is not None and _is_out(self._counted(job), micro_usd_h, job.spec.budget_usd):
                found[job.id] = f"its budget of {_words(job)} is spent"
            for name in self._line(job.spec.team):
                if _is_out(spent[name], burn[name], hard := self.specs[name].budget.hard_usd):
                    found[job.id] = f"the budget of team {name}, ${hard:g} this month, is spent"
        return found

    def _reservation(self, job: Job, micro_usd_h: float) -> int:
        hour = round(micro_usd_h * RESERVE_S / 3600.0)
        if job.spec.budget_usd is None:
            return hour
        return min(hour, micro_usd(job.spec.budget_usd) - self._counted(job) - round(_lead(micro_usd_h)))

    def _counted(self, job: Job) -> int:
        """What its own budgets are compared with."""
        return (self.spent if job.spec.budget_per == "job" else self.spent_month).get(job.id, 0)

    def _commit(self, team: str, amount: int) -> None:
        for name in self._line(team) if amount else ():
            self.committed[name] += amount
        self.version += self.has_soft or self.has_hard

    def _line(self, team: str) -> list[str]:
        """The team and those above it."""
        line = []
        while team in self.specs:
            line.append(team)
            team = self.specs[team].parent
        return line


def _words(job: Job) -> str:
    return f"${job.spec.budget_usd:g}{' this month' if job.spec.budget_per == 'month' else ''}"


def _reached(amount: int, limit_usd: float | None) -> bool:
    return limit_usd is not None and amount >= micro_usd(limit_usd)


def _is_out(spent: int, micro_usd_h: float, limit_usd: float | None) -> bool:
    return limit_usd is not None and spent + _lead(micro_usd_h) >= micro_usd(limit_usd)


def _lead(micro_usd_h: float) -> float:
    return micro_usd_h * LEAD_S / 3600.0
