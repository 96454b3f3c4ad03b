"""The API's operations on costs by group, and on the quotas and budgets of teams and jobs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from raytide.control.accounting.team_usage import limits
from raytide.control.api.auth import Caller
from raytide.control.views import CostTable, Live, TeamUse, TeamView
from raytide.core.errors import ConfigError, ConflictError, UsageError
from raytide.core.money import month_of
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.job import BudgetPer, Job, JobKind, JobSpec
from raytide.core.objects.team import TeamSpec, merged
from raytide.core.state import Store
from raytide.ledger import report
from raytide.ledger.report import accrued
from raytide.queue.admission.usage import fleet_capacity


class LimitsService:
    def __init__(self, store: Store, config: ClusterConfig) -> None:
        self._store, self._config = store, config
        self._changing = threading.Lock()

    def cost(self, by: report.By, caller: Caller, since_us: int, now_us: int) -> CostTable:
        """Returns the costs of the caller's team. For a token that is valid for all teams, returns the costs of all
        teams and the costs that belong to no team.
        """
        intervals = self._store.books.intervals()
        booked = self._store.books.lines(since_us=since_us, with_node=by == "node", with_day=by == "day")
        pending = [entry for entry in accrued(intervals, now_us) if entry.to_us > since_us]
        lines = [*booked, *report.as_lines(pending)]
        rates = report.rates(intervals)
        lines = [line for line in lines if caller.sees(line.team)]
        rates = {key: rate for key, rate in rates.items() if caller.sees(key[2])}
        subjects = {line.subject for line in lines} | {subject for _, subject, _, _ in rates}
        tags = self._tags(subjects) if by in ("project", "model") else {}
        losses = [line for line in self._store.books.losses(since_us=since_us) if caller.sees(line.team)]
        rows = report.rows(lines, rates, by, tags, now_us, losses)
        return CostTable(
            by=by,
            rows=rows,
            total_micro_usd=sum(row.amount_micro_usd for row in rows),
            forecast_micro_usd=sum(row.forecast_micro_usd for row in rows),
            grams_co2_per_kwh=self._config.settings.energy.grams_co2_per_kwh,
        )

    def teams(self, caller: Caller, live: Live, now_us: int) -> list[TeamView]:
        spent = self._store.books.spent([], month_of(now_us)).teams_month
        given = {team.name: tuple(sorted(team.given)) for team in self._store.teams()}
        return [
            TeamView(name, spec, spent.get(name, 0), live.teams.get(name, _NOTHING), given.get(name, ()))
            for name, spec in sorted(self.specs().items())
            if caller.sees(name)
        ]

    def change(self, name: str, changes: Mapping[str, object], caller: Caller) -> TeamSpec:
        """Sets some of a team's limits and returns the team's new spec. `changes` maps fields of TeamSpec to their new
        values. The value None resets a field to its configured value. Mappings, such as `quota`, are changed key by
        key. Concurrent changes are applied one after another.

        The caller needs a token for all teams.
        """
        caller.require_all()
        self.check_team(name)
        if "parent" in changes:
            raise ConfigError(
                "the parent of a team cannot be changed at run time.", hint="Set it in metadata.raytide.teams."
            )
        self._check_resources(changes)
        with self._changing:
            given: dict[str, Any] = next((dict(team.given) for team in self._store.teams() if team.name == name), {})
            for field, value in changes.items():
                before = given.get(field)
                given[field] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value
            given = {field: value for field, value in given.items() if value is not None and field != "parent"}
            spec = TeamSpec.parse(merged(self._config.settings.teams[name], given), where=f"team {name}")
            self._store.save_team(name, given)
            return spec

    def set_job_budget(self, job_id: str, usd: float | None, *, soft: bool, per: BudgetPer) -> Job:
        """Sets the hard or the soft budget of a job and returns the job. If `usd` is None, removes the budget.
        Concurrent changes are applied one after another.

        Both budgets of a job must have the same period.
        """
        with self._changing:
            job = self._store.job(job_id)
            return self._store.save_spec(job_id, _with_budget(job, usd, soft=soft, per=per))

    def specs(self) -> dict[str, TeamSpec]:
        return limits(self._config, self._store.teams())

    def check_team(self, team: str) -> None:
        known = self.specs()
        if team not in known:
            raise ConfigError(
                f"team {team} does not exist.",
                hint=f"Teams are {', '.join(sorted(known))}; metadata.raytide.teams adds more.",
            )

    def check_priority(self, priority: str) -> None:
        classes = self._config.settings.priorities
        if priority not in classes:
            raise ConfigError(
                f"priority class {priority} does not exist.",
                hint=f"Classes are {', '.join(sorted(classes, key=lambda name: -classes[name]))}.",
            )

    def _check_resources(self, changes: Mapping[str, object]) -> None:
        """Raises ConfigError for resources that no node has, because their quota would limit nothing."""
        known = fleet_capacity(self._config.node_types).keys()
        for field in ("quota", "borrow", "lend"):
            amounts = changes.get(field)
            if isinstance(amounts, Mapping) and (odd := sorted(amounts.keys() - known)):
                raise ConfigError(
                    f"{field}: no node type has resource {odd[0]}.",
                    hint=f"Resources are {', '.join(sorted(known))}.",
                )

    def _tags(self, subjects: set[str]) -> dict[str, dict[str, str]]:
        jobs = {job.id: _tags_of_job(job) for job in self._store.jobs_of(sorted(subjects))}
        return {**jobs, **{e.name: _tags_of_endpoint(e) for e in self._store.rollouts.applications(subjects)}}


_NOTHING = TeamUse({}, {}, {}, 0, 0.0)


def _with_budget(job: Job, usd: float | None, *, soft: bool, per: BudgetPer) -> JobSpec:
    """Returns the job's spec with this budget."""
    if job.is_final:
        raise ConflictError(f"{job.id} is {job.state}: its budget cannot be changed.", hint="Choose a live job.")
    name, other = ("soft_budget_usd", "budget_usd") if soft else ("budget_usd", "soft_budget_usd")
    if (kept := getattr(job.spec, other)) is None:
        per = "job" if usd is None else per
    elif usd is None:
        per = job.spec.budget_per
    elif per != job.spec.budget_per:
        kind, option = ("hard", "") if soft else ("soft", " --soft")
        raise UsageError(
            f"the {kind} budget of {job.id}, ${kept:g}, is by the {job.spec.budget_per}.",
            hint=f"Use one period for both, or remove the other first: `raytide budget set {job.id} none{option}`.",
        )
    limit = {name: usd, "budget_per": per}
    return JobSpec.parse({**job.spec.model_dump(mode="json"), **limit}, where=job.id)


def _tags_of_job(job: Job) -> dict[str, str]:
    """Returns the labels by which a job's costs are grouped: its own labels. A training without a `model` label gets
    its name as that label.
    """
    model = {"model": job.spec.name} if job.spec.kind is JobKind.TRAIN else {}
    return {**model, **job.spec.labels}


def _tags_of_endpoint(endpoint: Endpoint) -> dict[str, str]:
    return {"model": endpoint.spec.model, "project": endpoint.spec.project or "-"}
