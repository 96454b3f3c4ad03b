"""Budgets stop spending: reserved before, settled after, and drained in time."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.queue.cluster import H100, Cluster, brief, gpus, job, team

from raytide.core.money import micro_usd
from raytide.core.objects.job import JobState
from raytide.core.objects.plan import Preempt
from raytide.core.objects.team import Team
from raytide.queue.admission.scheduler import GRACE_S, SETTLE_S, schedule
from raytide.queue.budget import Budgets

HOUR = micro_usd(80)
"""The price of a whole node for an hour."""


def test_what_is_reserved_counts_before_it_is_spent_and_no_longer_after() -> None:
    blue = team("blue", spent_usd=10.0, budget={"hard_usd": 100})
    first = replace(job(1), reserved_micro_usd=micro_usd(50), state=JobState.RUNNING)
    purse = Budgets.of([blue], [first], {"job-1": micro_usd(20)})
    assert purse.committed["blue"] == micro_usd(10 + 30)
    assert purse.refusal(job(2), micro_usd(60)) is None
    assert purse.reserve(job(2), micro_usd(60)) == micro_usd(60)
    short = purse.refusal(job(3), 1.0)
    assert short is not None
    assert short.constraint == "budget"
    assert Budgets.of([blue], [replace(first, reserved_micro_usd=0)], {}).committed["blue"] == micro_usd(10)


def test_a_parents_budget_holds_for_all_its_teams() -> None:
    teams = [
        team("org", budget={"hard_usd": 100}),
        team("blue", spent_usd=70.0, parent="org"),
        team("red", parent="org"),
    ]
    purse = Budgets.of(teams, [], {})
    short = purse.refusal(job(1, team="red"), micro_usd(40))
    assert short is not None
    assert "team org has spent or reserved $70.00 of $100" in short.reason


def test_jobs_submitted_at_once_cannot_together_overdraw() -> None:
    c = Cluster(nodes=8, teams=(team("blue", budget={"hard_usd": 250}),))
    for _ in range(8):
        c.submit(gpus(8))
    decided = [what for _, what in brief(c.step())]
    assert decided == ["admit"] * 3 + ["budget"] * 5


def test_beyond_the_soft_limit_nothing_is_borrowed() -> None:
    spot = "spot"
    blue = team("blue", spent_usd=90.0, quota={"GPU": 4}, budget={"soft_usd": 80})
    c = Cluster(teams=(blue,))
    c.node_type = c.node_type.model_copy(update={"market": spot})
    assert brief(_submitted(c, 4)) == [("job-1", "admit")]
    assert brief(_submitted(c, 1)) == [("job-2", "budget")]
    c.teams = (replace(blue, spent_micro_usd=0),)
    assert brief(c.step()) == [("job-2", "admit")]


def test_a_job_beyond_its_own_budget_checkpoints_and_waits_until_it_gets_more() -> None:
    c = Cluster()
    mine = c.submit(gpus(8), budget_usd=10)
    c.step()
    c.spent = {mine: micro_usd(9.9)}
    (preempt,) = [action for action in c.step() if isinstance(action, Preempt)]
    assert preempt.reason == "its budget of $10 is spent"
    assert brief(c.step(GRACE_S)) == [(mine, "budget")]
    assert c.jobs[mine].reserved_micro_usd == 0
    c.jobs[mine] = replace(c.jobs[mine], spec=c.jobs[mine].spec.model_copy(update={"budget_usd": 20.0}))
    assert brief(c.step(1.0)) == [(mine, "admit")]


def test_a_job_without_budget_preempts_no_other_and_does_not_block_preemption() -> None:
    c = Cluster(nodes=1)
    low = c.submit(gpus(8), priority="low")
    c.step()
    broke = c.submit(gpus(8), priority="high", budget_usd=5)
    c.spent = {broke: micro_usd(5)}
    high = c.submit(gpus(8), priority="high")
    assert brief(c.step()) == [(low, "preempt"), (broke, "budget"), (high, "admit")]


def test_the_budget_reserves_the_price_of_the_placement() -> None:
    """Once the cheap type is taken, the other one is all that is left."""
    cheap = H100.model_copy(update={"name": "cheap", "price_micro_usd_h": micro_usd(8), "max_nodes": 0})
    c = Cluster(nodes=1, teams=(team("blue", budget={"hard_usd": 20}),))
    c.submit(gpus(8))
    both = replace(c.snapshot, node_types=(*c.snapshot.node_types, cheap))
    assert brief(schedule(both)) == [("job-1", "budget")]


def test_an_elastic_gang_takes_no_more_than_is_paid_for() -> None:
    c = Cluster(nodes=1, teams=(team("blue", budget={"hard_usd": 45}),))
    mine = c.submit(gpus(1, members=8, at_least=2))
    c.step()
    assert (c.held(mine), c.jobs[mine].reserved_micro_usd) == (2, micro_usd(20))
    c.step(SETTLE_S)
    assert c.held(mine) == 2


def test_a_job_grows_no_further_than_its_own_budget_lasts_and_is_not_stopped_for_having_grown() -> None:
    c = Cluster(nodes=1)
    other = c.submit(gpus(5), priority="high")
    mine = c.submit(gpus(1, members=8, at_least=1), budget_usd=60)
    c.step()
    assert c.held(mine) == 3
    c.end(other)
    c.spent = {mine: micro_usd(8)}
    assert brief(c.step(SETTLE_S)) == []
    assert c.held(mine) == 4, "$52 are an hour of four, with the time to give way, not of five"
    c.spent = {mine: micro_usd(56)}
    assert brief(c.step(SETTLE_S)) == []
    assert c.held(mine) == 4


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 4, 8]), st.integers(0, 60)), min_size=1, max_size=6),
    st.floats(5.0, 120.0),
    st.integers(10, 30),
)
def test_settled_spend_stays_within_the_hard_limit(
    wishes: list[tuple[int, int]], limit_usd: float, tick_s: int
) -> None:
    """Booked amounts lag by a minute, as in the ledger."""
    c = Cluster(nodes=2)
    spent: list[dict[str, float]] = [{}]
    for tick in range(200):
        known = spent[max(0, len(spent) - 1 - 60 // tick_s)]
        c.spent = {job_id: int(amount) for job_id, amount in known.items()}
        total = int(sum(known.values()))
        c.teams = (Team("blue", team("blue", budget={"hard_usd": limit_usd}).spec, spent_micro_usd=total),)
        for gpus_, at in wishes:
            if at == tick:
                c.submit(gpus(float(gpus_)))
        c.step(float(tick_s))
        held = {job_id: HOUR / 8 * members * tick_s / 3600 for job_id, members in c.running().items()}
        sizes = {job_id: c.jobs[job_id].spec.gang.shapes[0].resources["GPU"] for job_id in held}
        now = {**spent[-1]}
        for job_id, amount in held.items():
            now[job_id] = now.get(job_id, 0.0) + amount * sizes[job_id]
        spent.append(now)
    assert sum(spent[-1].values()) <= limit_usd * 1e6 + 1


def _submitted(c: Cluster, gpu: float):  # type: ignore[no-untyped-def]
    c.submit(gpus(gpu))
    return c.step()


def test_what_would_be_preempted_at_once_is_not_admitted() -> None:
    free = H100.model_copy(update={"price_micro_usd_h": 0})
    c = Cluster(node_type=free)
    mine = c.submit(gpus(8), budget_usd=10)
    c.step()
    c.spent = {mine: micro_usd(11)}  # on nodes with a price
    assert brief(c.step()) == [(mine, "preempt")]
    assert brief(c.step(GRACE_S)) == [(mine, "budget")]
    for spent_usd, hard_usd, node_type, own in ((0.0, 0, free, {}), (98.0, 100, H100, {"budget_usd": 5})):
        c = Cluster(node_type=node_type, teams=(team("blue", spent_usd=spent_usd, budget={"hard_usd": hard_usd}),))
        theirs = c.submit(gpus(8), **own)
        assert brief(c.step()) == brief(c.step(1.0)) == [(theirs, "budget")]
