"""Deadline jobs on small markets: the bound is a bound, baselines do as published, nobody misses."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from raytide.autoscaler.deadlines.value_iteration import Values
from raytide.cli.app import app
from raytide.core.errors import DataError, UsageError
from raytide.simulate.deadline import raytide as raytide_policy
from raytide.simulate.deadline.baselines import greedy, uniform_progress_a, uniform_progress_b, uniform_progress_c
from raytide.simulate.deadline.compare import NONE, ON_DEMAND, Terms, TickView, Up, replay, run, starts
from raytide.simulate.deadline.optimal import cheapest_usd
from raytide.simulate.deadline.policies import POLICIES, policy

TICK_S = 3600.0


def market(*zones: str) -> Up:
    """`1` where a zone is up, a character for each tick."""
    return np.array([[tick == "1" for tick in zone] for zone in zones])


def terms(work: int, restart: int, deadline: int) -> Terms:
    return Terms(work, restart, deadline, TICK_S, spot_usd_h=1.0, ondemand_usd_h=4.0)


@st.composite
def jobs(draw: st.DrawFn, most_zones: int = 3, most_work: int = 12) -> tuple[Terms, Up]:
    work, restart = draw(st.integers(1, most_work)), draw(st.integers(1, 3))
    deadline = work + restart + draw(st.integers(0, 2 * most_work))
    zones = draw(st.integers(1, most_zones))
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 8)), min_size=1, max_size=12)
    up = np.zeros((zones, deadline), dtype=bool)
    for zone in range(zones):
        spells = [np.repeat(is_up, ticks) for is_up, ticks in draw(runs)]
        up[zone] = np.resize(np.concatenate(spells), deadline)
    return terms(work, restart, deadline), up


def exhaustive(job: Terms, up: Up) -> float:
    """The cheapest of every sequence of choices, by the rules of `replay`."""

    @cache
    def best(tick: int, work: int, held: int, starting: int) -> float:
        if not work:
            return 0.0
        if tick == job.deadline:
            return float("inf")
        if held >= 0 and not up[held, tick]:
            held, starting = NONE, 0
        found = float("inf")
        for choice in (NONE, ON_DEMAND, *np.flatnonzero(up[:, tick])):
            left = starting if choice == held else 0 if choice == NONE else job.restart
            works = choice != NONE and not left
            after = best(tick + 1, work - works, int(choice), max(0, left - 1))
            found = min(found, job.usd(int(choice)) + after)
        return found

    return best(0, job.work, NONE, 0)


@settings(max_examples=60, deadline=None)
@given(jobs(most_zones=2, most_work=5))
def test_optimal_is_the_cheapest_of_every_sequence_of_choices(drawn: tuple[Terms, Up]) -> None:
    job, up = drawn
    assert cheapest_usd(job, up) == pytest.approx(exhaustive(job, up))


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_no_market_makes_any_policy_miss_or_beat_optimal(drawn: tuple[Terms, Up]) -> None:
    job, up = drawn
    least = cheapest_usd(job, up)
    for name, runs in POLICIES.items():
        outcome = runs(job, up)(0)
        assert not outcome.is_missed, name
        assert outcome.cost_usd >= least - 1e-9, name


def test_greedy_waits_for_spot_until_time_is_short_and_then_stays_on_demand() -> None:
    job = terms(work=4, restart=1, deadline=9)
    # Waits while 9 - t >= 4 + 2, that is to tick 3; then a start and 4 ticks on demand, though spot is back.
    assert replay(job, market("000000111"), greedy(job)).cost_usd == 5 * 4.0
    assert replay(job, market("001111111"), greedy(job)).cost_usd == 5 * 1.0


@pytest.mark.parametrize(
    ("policy", "ahead_with_spot", "ahead_without", "behind_with_spot"),
    [
        (uniform_progress_a, 0, NONE, ON_DEMAND),
        (uniform_progress_b, 0, ON_DEMAND, ON_DEMAND),
        (uniform_progress_c, 0, ON_DEMAND, 0),
    ],
)
def test_the_variants_of_uniform_progress_differ_in_when_they_leave_on_demand(
    policy: object, ahead_with_spot: int, ahead_without: int, behind_with_spot: int
) -> None:
    job = terms(work=20, restart=1, deadline=41)
    choose = policy(job)  # type: ignore[operator]
    spot, nothing = np.array([True]), np.array([False])
    ahead, behind = 10, 19  # work left at tick 10, where 5 should be done
    assert choose(TickView(10, ahead, ON_DEMAND, 0, spot)) == ahead_with_spot
    assert choose(TickView(10, ahead, ON_DEMAND, 0, nothing)) == ahead_without
    assert choose(TickView(10, behind, ON_DEMAND, 0, spot)) == behind_with_spot


def test_uniform_progress_goes_on_demand_when_it_is_behind_and_waits_when_it_is_not() -> None:
    job = terms(work=20, restart=1, deadline=41)
    choose = uniform_progress_b(job)
    assert choose(TickView(10, 19, NONE, 0, np.array([False]))) == ON_DEMAND
    assert choose(TickView(10, 10, NONE, 0, np.array([False]))) == NONE
    assert choose(TickView(10, 10, NONE, 0, np.array([False, True]))) == 1


def test_a_lost_zone_ends_its_bill_and_its_start() -> None:
    job = terms(work=2, restart=2, deadline=20)
    # One tick of the first start is lost with the zone; the second start takes two, the work two.
    assert replay(job, market("10001111111111111111"), greedy(job)).cost_usd == 5 * 1.0


def test_starts_are_even_and_leave_room_for_the_whole_deadline() -> None:
    job = terms(work=4, restart=1, deadline=10)
    assert starts(40, job, 4) == [0, 10, 20, 30]
    with pytest.raises(DataError, match="one run needs 10"):
        starts(9, job, 1)


def test_terms_are_rounded_to_the_ticks_of_the_trace() -> None:
    assert Terms.of(48, 0.2, 0.25, 195) == Terms(886, 4, 1107 + 4, 195)
    assert Terms.of(48, 0.2, 0.1, 600) == Terms(288, 1, 316 + 1, 600)


def test_the_command_prints_starts_cost_and_misses(tmp_path: Path) -> None:
    fields = {"kind": "availability", "collection": "aws", "gpu": "v100", "gpus_per_node": 1, "gap_seconds": 600}
    spot = tmp_path / "spot.json"
    spot.write_text(json.dumps({f"aws/{zone}": {**fields, "zone": zone, "rle": [[1, 300]]} for zone in ("a", "b")}))
    command = ["simulate", "deadline", "--spot", str(spot), "--collection", "aws", "--zones", "a,b", "--slack", "0.25"]
    asked = [*command, "--hours", "8", "--starts", "3", "--policy", "raytide", "--json"]
    shown = json.loads(CliRunner().invoke(app, asked).stdout)
    assert (shown["starts"], shown["missed_deadlines"], shown["zones"]) == (3, 0, ["a", "b"])
    assert shown["cost_vs_ondemand"] == pytest.approx(0.3)


def test_the_value_table_of_a_long_job_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of work with short starts would need hundreds of gigabytes."""
    sizes: list[int] = []
    original = raytide_policy.solve

    def sized(*args: Any, **more: Any) -> Values:
        table = original(*args, **more)
        sizes.append(table.max_left)
        return table

    monkeypatch.setattr(raytide_policy, "solve", sized)
    monkeypatch.setattr(raytide_policy, "MOST_STEPS", 40, raising=False)
    job = terms(work=100, restart=1, deadline=130)
    outcome = raytide_policy.raytide(job, market("1" * 130))(0)
    assert max(sizes) <= 42
    assert not outcome.is_missed
    assert outcome.cost_usd <= 1.05 * 101


def test_a_job_longer_than_the_table_is_in_time_and_waits_for_spot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raytide_policy, "MOST_STEPS", 20, raising=False)
    job, up = terms(work=150, restart=1, deadline=230), market(("1" * 20 + "000") * 10)
    outcome = raytide_policy.raytide(job, up[:, :230])(0)
    assert not outcome.is_missed
    assert outcome.cost_usd < 0.5 * job.ondemand_usd


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="uniform-progress-b"):
        policy("best")


@pytest.mark.parametrize(
    "wrong", [{"hours": math.nan}, {"hours": math.inf}, {"slack": math.nan}, {"restart_h": math.inf}, {"count": 0}]
)
def test_impossible_jobs_are_refused(wrong: dict[str, Any]) -> None:
    terms = {"slack": 0.25, "hours": 4.0, "restart_h": 0.2, "count": 3, **wrong}
    with pytest.raises(UsageError, match="above zero"):
        run((), policy("greedy"), policy="greedy", collection="c", **terms)
