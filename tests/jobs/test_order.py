"""Who holds the GPUs: the new first, gangs that waited longer than others soon, long runs last, and no GPU wasted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytide.jobs.order import LAST, LONGER, NEW, OVERDUE, SHORT, Claims, bands, fill, holders

HOUR_S = 3600.0


def claims(*rows: tuple[int, float, float, float]) -> Claims:
    """(GPUs, GPU-hours attained, hours held, hours queued), in order of submission."""
    gpus, attained_h, held_h, queued_h = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    submitted_s = np.arange(len(rows), dtype=float)
    return Claims(gpus.astype(np.int64), submitted_s, attained_h * HOUR_S, held_h * HOUR_S, queued_h * HOUR_S)


def test_least_attained_service_goes_first_and_the_earlier_of_equals() -> None:
    rows = claims((1, 20, 2, 0), (1, 5, 2, 0), (1, 0, 0, 0), (1, 0.5, 0.5, 0))
    assert bands(rows).tolist() == [LONGER, SHORT, NEW, NEW]
    assert holders(rows, 3).tolist() == [2, 3, 1]


def test_a_gang_that_waited_longer_than_the_others_goes_before_all_but_the_new() -> None:
    gang, other, new = (16, 20, 2, 7), (1, 5, 5, 6), (1, 0, 0, 0)
    assert bands(claims(gang, other, new)).tolist() == [OVERDUE, SHORT, NEW]
    assert bands(claims(gang, (1, 5, 5, 8), new)).tolist() == [LONGER, SHORT, NEW]


def test_a_gang_is_patient_for_hours_even_where_nobody_else_waits() -> None:
    assert bands(claims((8, 20, 2, 3.9))).tolist() == [LONGER]
    assert bands(claims((8, 20, 2, 4.1))).tolist() == [OVERDUE]


def test_a_small_job_well_into_its_run_counts_as_short_until_it_ran_for_days() -> None:
    assert bands(claims((2, 22, 11, 0), (2, 26, 13, 0), (2, 146, 73, 0))).tolist() == [LONGER, SHORT, LAST]


def test_a_gang_that_ran_for_days_does_not_come_last() -> None:
    assert bands(claims((8, 800, 100, 0))).tolist() == [LONGER]


def test_who_runs_for_days_is_not_what_a_gang_is_compared_with() -> None:
    assert bands(claims((8, 20, 2, 5), (1, 80, 80, 200))).tolist() == [OVERDUE, LAST]


def test_a_gang_gets_all_or_nothing_and_smaller_ones_what_it_cannot_use() -> None:
    assert fill(np.array([0, 1, 2]), np.array([6, 4, 2]), 8).tolist() == [0, 2]
    assert fill(np.array([1, 0, 2]), np.array([6, 4, 2]), 8).tolist() == [1, 2]
    assert fill(np.array([0]), np.array([9]), 8).tolist() == []


hours = st.floats(0, 200)


@given(st.lists(st.tuples(st.integers(1, 64), hours, hours, hours), min_size=1, max_size=40), st.integers(1, 128))
def test_no_gpu_is_given_twice_and_none_is_left_that_somebody_could_use(
    rows: list[tuple[int, float, float, float]], total: int
) -> None:
    table = claims(*rows)
    picked = holders(table, total)
    assert len(set(picked.tolist())) == len(picked)
    free = total - int(table.gpus[picked].sum())
    assert free >= 0
    assert all(gpus > free for row, gpus in enumerate(table.gpus) if row not in picked)


@given(st.lists(st.tuples(st.integers(1, 8), hours, hours, hours), min_size=1, max_size=20), st.integers(8, 16))
def test_who_is_refused_is_refused_for_earlier_ones_only(
    rows: list[tuple[int, float, float, float]], total: int
) -> None:
    """So nobody of a later band can keep the head of the queue waiting."""
    table = claims(*rows)
    picked = set(holders(table, total).tolist())
    order = np.lexsort((table.submitted_s, bands(table))).tolist()
    for place, row in enumerate(order):
        if row not in picked:
            earlier = sum(int(table.gpus[other]) for other in order[:place] if other in picked)
            assert earlier + table.gpus[row] > total
