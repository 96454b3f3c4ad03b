"""Limits of teams and budgets of jobs: changes at the same time are all kept."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.control.api.test_routes import GANG, LOCAL

from raytide.control.api.auth import ANY_TEAM, Caller
from raytide.control.api.services.limits import LimitsService
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.job import JobSpec
from raytide.core.state import Store

ROOT = Caller(user="root", team=ANY_TEAM)


@pytest.fixture
def limits(store: Store) -> Iterator[LimitsService]:
    """The service, while threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield LimitsService(store, load_cluster(LOCAL))
    sys.setswitchinterval(before)


def test_changes_of_a_team_at_the_same_time_are_all_kept(limits: LimitsService, store: Store) -> None:
    amounts = {"CPU": 2.0}
    given = {"weight": 2.0, "quota": amounts, "borrow": amounts, "lend": amounts, "budget": {"hard_usd": 5.0}}
    with ThreadPoolExecutor(len(given)) as pool:
        list(pool.map(lambda field: limits.change("default", {field: given[field]}, ROOT), given))
    assert {team.name: team.given for team in store.teams()} == {"default": given}


def test_both_budgets_of_jobs_are_kept_when_they_are_set_at_the_same_time(limits: LimitsService, store: Store) -> None:
    jobs = [store.submit_job(JobSpec.parse(GANG, where="job"), "ana", 1000.0).id for _ in range(8)]
    asked = [(job, usd) for job in jobs for usd in (1.0, 2.0)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: limits.set_job_budget(each[0], each[1], soft=each[1] == 1.0, per="job"), asked))
    specs = [store.job(job).spec for job in jobs]
    assert {(spec.soft_budget_usd, spec.budget_usd) for spec in specs} == {(1.0, 2.0)}
