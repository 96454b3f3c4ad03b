"""The deadline decision: safe whatever the market does, and led by what was learned of it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.autoscaler.deadlines.policy import Allocation, DeadlineJob, ZoneView, decide
from raytide.autoscaler.deadlines.value_iteration import Values, solve
from raytide.autoscaler.spot.availability_model import AGES_S, BANDS, PRIOR_HAZARD, AvailabilityModel, band

HOUR_S = 3600.0
RESTART_S = 900.0


@cache
def values(spells: tuple[int, ...] = (), zones: int = 1) -> Values:
    """Learned from zones that were by turns up and gone, for so many ticks of five minutes each."""
    learned = AvailabilityModel(zones)
    tick = 0
    for number, ticks in enumerate(spells):
        for _ in range(ticks):
            learned.observe(tick * 300.0, [number % 2 == 0] * zones)
            tick += 1
    return solve(learned.current_rates(), left_s=22 * HOUR_S, work_s=10 * HOUR_S, restart_s=RESTART_S, price_ratio=0.3)


def job(left_h: float, work_h: float, held: Allocation = None, starting_s: float = 0.0) -> DeadlineJob:
    return DeadlineJob(left_h * HOUR_S, work_h * HOUR_S, RESTART_S, 300.0, held, starting_s)


def up(hours: float) -> ZoneView:
    return ZoneView(True, hours * HOUR_S)


def gone(hours: float) -> ZoneView:
    return ZoneView(False, hours * HOUR_S)


STEADY = (1200, 6, 1200, 6)
"""Four days up, half an hour gone."""
BROKEN = (1, 120) * 20
"""Five minutes up, ten hours gone."""


def test_a_steady_zone_is_taken_and_kept() -> None:
    assert decide(job(15, 10), [up(5)], values(STEADY)) == 0
    assert decide(job(15, 10, held=0), [up(5)], values(STEADY)) == 0


def test_a_zone_that_never_lives_through_a_start_is_left_alone() -> None:
    assert decide(job(12, 10), [up(0)], values(BROKEN)) != 0
    assert decide(job(12, 10, held="on_demand"), [up(0)], values(BROKEN)) == "on_demand"


def test_a_lost_zone_counts_as_nothing_held() -> None:
    assert decide(job(15, 10, held=0), [gone(0)], values(STEADY)) is None


def test_a_short_drought_of_a_steady_market_is_waited_out_only_while_there_is_slack() -> None:
    assert decide(job(15, 10), [gone(0.1)], values(STEADY)) is None
    assert decide(job(10.3, 10), [gone(0.1)], values(STEADY)) == "on_demand"


def test_on_demand_is_left_for_a_steady_zone() -> None:
    assert decide(job(15, 10, held="on_demand"), [up(5)], values(STEADY)) == 0


def test_the_zone_that_lived_longer_is_taken() -> None:
    learned = AvailabilityModel(2)
    for tick in range(2000):
        learned.observe(tick * 900.0, [tick % 40 < 30, tick % 3 == 0])
    table = solve(learned.current_rates(), left_s=22 * HOUR_S, work_s=10 * HOUR_S, restart_s=RESTART_S, price_ratio=0.3)
    assert decide(job(15, 10), [up(4), up(0.1)], table) == 0


@settings(max_examples=60, deadline=None)
@given(
    zones=st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=3),
    slack=st.integers(0, 60),
    restart=st.integers(1, 4),
    spells=st.sampled_from([(), STEADY, BROKEN]),
)
def test_no_market_makes_a_job_late_that_could_finish_on_demand(
    zones: list[list[bool]], slack: int, restart: int, spells: tuple[int, ...]
) -> None:
    """Ticks of a quarter of an hour; a zone is lost at the start of a tick. The learned market may be all wrong."""
    table = values(spells, len(zones))
    work, left, held, starting = 24, 24 + restart + slack, None, 0
    ages = np.zeros(len(zones))
    was = [False] * len(zones)
    tick = 0
    decision: Allocation
    while work:
        assert left > 0
        now = [zone[tick % len(zone)] for zone in zones]
        ages = np.where(np.equal(now, was), ages + 900, 0)
        views = [ZoneView(is_up, age) for is_up, age in zip(now, ages, strict=True)]
        here = DeadlineJob(left * 900.0, work * 900.0, restart * 900.0, 900.0, held, starting * 900.0)
        decision = decide(here, views, table)
        assert not isinstance(decision, int) or now[decision]
        if decision != held or (isinstance(held, int) and not now[held]):
            held, starting = decision, restart if decision is not None else 0
        if starting:
            starting -= 1
        elif held is not None:
            work -= 1
        left, tick, was = left - 1, tick + 1, now


def test_hazards_follow_what_was_seen_and_the_other_ages_where_nothing_was() -> None:
    learned = AvailabilityModel(1)
    assert learned.current_rates().lost == pytest.approx(PRIOR_HAZARD)
    for tick in range(4000):
        learned.observe(tick * 900.0, [tick % 4 < 2])  # half an hour up, half an hour gone
    market = learned.current_rates()
    assert market.lost[1] > 5 * market.lost[0]
    assert market.found[1] > 5 * market.found[0]
    restless = market.lost[2:] / PRIOR_HAZARD[2:]
    assert restless == pytest.approx([restless[0]] * (BANDS - 2))
    assert restless[0] > 1.2
    assert market.switched.sum() == 0


def test_a_zone_never_up_at_two_looks_in_a_row_is_not_expected_to_be() -> None:
    learned = AvailabilityModel(1)
    for tick in range(6000):
        learned.observe(tick * 900.0, [tick % 3 == 0])
    assert np.exp(-learned.current_rates().lost[0] * 900.0) < 0.2


def test_every_spell_and_every_drought_that_ended_is_counted() -> None:
    learned = AvailabilityModel(1)
    for tick, is_up in enumerate([True, False, False, True, True, False]):
        learned.observe(tick * 900.0, [is_up])
    assert learned.ends == 3


def test_a_zone_that_takes_over_is_told_from_a_market_that_is_gone() -> None:
    learned = AvailabilityModel(2)
    for tick in range(4000):
        learned.observe(tick * 900.0, [tick % 8 < 5, tick % 8 >= 4])  # they overlap: one is always there
    market = learned.current_rates()
    assert market.switched.sum() > 20 * market.lost[:3].sum() * 0.1
    assert market.lost[2] < 0.1 * market.switched[2].sum()


def test_what_was_learned_fades() -> None:
    learned = AvailabilityModel(1)
    for tick in range(2000):
        learned.observe(tick * 900.0, [tick % 2 == 0])
    before = learned.current_rates().lost[0]
    for tick in range(2000, 12000):
        learned.observe(tick * 900.0, [True])
    learned.observe(12000 * 900.0, [False])
    for tick in range(12001, 12200):
        learned.observe(tick * 900.0, [tick % 30 > 0])
    assert learned.current_rates().lost[0] < before / 3


def test_bands_begin_at_their_ages() -> None:
    assert [band(age) for age in AGES_S] == list(range(BANDS))
    assert band(899.9) == 0
