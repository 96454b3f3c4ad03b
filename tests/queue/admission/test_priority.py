"""The order: new jobs first, overdue gangs soon, long runs last, and no GPU idle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytide.queue.admission.cycle import run_cycle
from raytide.queue.admission.priority import (
    LAST,
    LATE,
    LONGER,
    NEW,
    OVERDUE,
    SHORT,
    URGENT,
    QueueTable,
    bands,
    fair_wait_s,
    ranked,
)
from raytide.simulate.jobs.raytide import GpuCapacity

HOUR_S = 3600.0


def queue_table(
    *rows: tuple[float, float, float, float],
    held: Sequence[int] = (),
    fixed: Sequence[int] = (),
    cooling: Sequence[int] = (),
    urgent: Sequence[int] = (),
    priority: Sequence[int] | None = None,
    share: Sequence[float] | None = None,
    own: Sequence[int] = (),
    old_s: float = 0.0,
) -> QueueTable:
    """(GPUs, GPU-hours attained, hours held, hours queued), in order of submission; `held` and others name rows."""
    gpus, attained_h, held_h, queued_h = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    n = len(rows)

    def mask(chosen: Sequence[int]) -> np.ndarray:  # type: ignore[type-arg]
        return np.isin(np.arange(n), list(chosen))

    return QueueTable(
        gpus=gpus,
        submitted_s=np.arange(n, dtype=float),
        attained_gpu_s=attained_h * HOUR_S,
        held_s=held_h * HOUR_S,
        queued_s=queued_h * HOUR_S,
        priority=np.array(priority or [0] * n),
        share=np.array(share or [0.0] * n),
        is_held=mask(held),
        is_preemptible=mask(held) & ~mask(fixed),
        in_cooldown=mask(cooling),
        is_urgent=mask(urgent),
        within_nominal_quota=mask(own),
        aging_cutoff_s=old_s,
    )


def holders(table: QueueTable, total: int) -> list[int]:
    state = GpuCapacity.of(table, total)
    run_cycle(table, state)
    assert float(table.gpus[state.holds].sum()) == total - state.free
    return sorted(np.flatnonzero(state.holds).tolist())


def test_an_urgent_job_goes_first_in_its_class_and_is_preempted_by_no_class() -> None:
    rows = queue_table((1, 20, 2, 0), (1, 0, 0, 0), (1, 5, 2, 0), urgent=[0], priority=[0, 0, 1])
    assert bands(rows).tolist() == [URGENT, NEW, SHORT]
    assert ranked(rows).tolist() == [2, 0, 1]
    assert holders(queue_table((1, 20, 2, 0), (1, 0, 0, 1), held=[0], priority=[0, 1]), 1) == [1]
    assert holders(queue_table((1, 20, 2, 0), (1, 0, 0, 1), held=[0], urgent=[0], priority=[0, 1]), 1) == [0]


def test_least_attained_service_goes_first_and_the_earlier_of_equals() -> None:
    rows = queue_table((1, 20, 2, 0), (1, 5, 2, 0), (1, 0, 0, 0), (1, 0.5, 0.5, 0))
    assert bands(rows).tolist() == [LONGER, SHORT, NEW, NEW]
    assert ranked(rows).tolist() == [2, 3, 1, 0]
    assert holders(rows, 3) == [1, 2, 3]


def test_a_higher_class_goes_first_whatever_the_band_and_within_a_band_whose_team_used_less() -> None:
    rows = [(1.0, 0.0, 0.0, 0.0)] * 3
    assert ranked(queue_table(*rows, (1, 20, 2, 0), priority=[0, 0, 0, 1])).tolist() == [3, 0, 1, 2]
    assert ranked(queue_table(*rows, share=[2.0, 0.0, 1.0])).tolist() == [1, 2, 0]


def test_a_gang_that_waited_longer_than_the_others_goes_before_all_but_the_new() -> None:
    gang, other, new = (16, 20, 2, 7), (1, 5, 5, 6), (1, 0, 0, 0)
    assert bands(queue_table(gang, other, new)).tolist() == [OVERDUE, SHORT, NEW]
    assert bands(queue_table(gang, (1, 5, 5, 8), new)).tolist() == [LONGER, SHORT, NEW]


def test_where_it_is_first_come_first_served_the_oldest_that_finds_no_room_waits_for_as_long_as_it_is_there() -> None:
    rows = ((4, 20, 30, 0), (4, 5, 5, 15), (2, 5, 5, 5), (1, 0, 0, 1))
    assert fair_wait_s(queue_table(*rows, held=[0, 2])) == 20 * HOUR_S
    assert fair_wait_s(queue_table(*rows, held=[0, 1])) == 10 * HOUR_S
    assert fair_wait_s(queue_table(*rows, held=[0, 1, 2, 3])) == 0.0
    assert fair_wait_s(queue_table((8, 0, 0, 3))) == 3 * HOUR_S


def test_a_gang_that_waited_longer_than_it_would_among_equals_is_overdue_however_long_the_others_wait() -> None:
    gang, other, late = (16, 20, 2, 7), (1, 5, 5, 8), (1, 0, 0, 6)
    assert bands(queue_table(other, gang, late, held=[1])).tolist() == [SHORT, LATE, NEW], (
        "it would wait for nine hours"
    )
    assert bands(queue_table(other, gang, late, held=[0, 1])).tolist() == [SHORT, OVERDUE, NEW], (
        "nobody older than six would"
    )


def test_a_gang_that_waits_goes_before_other_long_jobs_shortly_before_it_is_overdue() -> None:
    def band(queued_h: float) -> int:
        holder, oldest, gang = (8, 30, 3, 0), (2, 20, 1, 9), (8, 20, 1, queued_h)
        rows = queue_table(holder, oldest, gang, held=[0])
        assert fair_wait_s(rows) == 10 * HOUR_S
        return int(bands(rows)[2])

    assert [band(queued_h) for queued_h in (8.4, 8.6, 8.9)] == [LONGER, LATE, LATE]
    rows = queue_table((8, 30, 3, 0), (2, 20, 1, 9), (8, 20, 1, 8.6), (1, 5, 5, 3), held=[0])
    assert ranked(rows).tolist() == [3, 2, 0, 1]


def test_a_gang_with_gpus_keeps_its_band_though_the_others_wait_for_longer_meanwhile() -> None:
    def band(queued_h: float, *, is_held: bool) -> int:
        holder, gang, oldest = (8, 30, 3, 0), (8, 20, 1, queued_h), (9, 20, 1, 9)
        small = (1, 20, 1, 9)
        rows = queue_table(holder, gang, oldest, small, held=[0, 1] if is_held else [0])
        assert fair_wait_s(rows) == 10 * HOUR_S
        return int(bands(rows)[1])

    assert [band(queued_h, is_held=False) for queued_h in (4.9, 5.1, 8.2)] == [LONGER] * 3
    assert [band(queued_h, is_held=True) for queued_h in (4.9, 5.1, 8.0, 8.2)] == [LONGER, LATE, LATE, OVERDUE]


def test_a_gang_is_not_overdue_for_hours_even_if_no_other_job_waits() -> None:
    assert bands(queue_table((8, 20, 2, 3.9))).tolist() == [LONGER]
    assert bands(queue_table((8, 20, 2, 4.1))).tolist() == [OVERDUE]


def test_a_small_job_well_into_its_run_counts_as_short_until_it_ran_for_days() -> None:
    assert bands(queue_table((2, 14, 7, 0), (2, 18, 9, 0), (2, 146, 73, 0))).tolist() == [LONGER, SHORT, LAST]


def test_only_the_few_oldest_jobs_go_last_whether_they_ran_or_waited() -> None:
    rows = ((2, 146, 73, 0), (2, 100, 50, 150))
    assert bands(queue_table(*rows)).tolist() == [LAST, LAST]
    assert bands(queue_table(*rows, old_s=100 * HOUR_S)).tolist() == [SHORT, LAST]


def test_a_gang_that_ran_for_days_does_not_come_last() -> None:
    assert bands(queue_table((8, 800, 100, 0))).tolist() == [LONGER]


def test_a_gang_is_not_compared_with_jobs_that_have_run_for_days() -> None:
    assert bands(queue_table((8, 20, 2, 5), (1, 80, 80, 200))).tolist() == [OVERDUE, LAST]


def test_a_gang_gets_all_or_nothing_and_smaller_ones_what_it_cannot_use() -> None:
    assert holders(queue_table((6, 0, 0, 0), (4, 0, 0, 0), (2, 0, 0, 0)), 8) == [0, 2]


def test_the_lowest_are_preempted_and_no_more_than_necessary() -> None:
    old, older = (4, 20, 5, 0), (2, 400, 80, 0)
    rows = (old, older, (2, 20, 5, 0), (4, 0, 0, 0))
    assert holders(queue_table(*rows, held=[0, 1, 2]), 8) == [0, 3], "the last two are enough"
    assert holders(queue_table(*rows, held=[0, 1, 2]), 10) == [0, 2, 3]
    assert holders(queue_table(*rows, held=[0, 1, 2], fixed=[1]), 8) == [1, 2, 3]
    assert holders(queue_table(*rows, held=[0, 1, 2], cooling=[3]), 8) == [0, 1, 2]


hours = st.floats(0, 200)


@given(
    st.lists(st.tuples(st.integers(1, 64), hours, hours, hours, st.booleans(), st.booleans()), min_size=1, max_size=30),
    st.integers(1, 128),
)
def test_no_gpu_is_given_twice_and_none_is_left_that_somebody_could_use(
    rows: list[tuple[int, float, float, float, bool, bool]], total: int
) -> None:
    fits = [(row, i) for i, row in enumerate(rows)]
    held, used = [], 0
    for row, i in fits:
        if row[4] and used + row[0] <= total:
            held.append(i)
            used += row[0]
    table = queue_table(*(row[:4] for row in rows), held=held, fixed=[i for row, i in fits if row[5]])
    state = GpuCapacity.of(table, total)
    run_cycle(table, state)
    assert state.free >= 0
    order = ranked(table).tolist()
    for place, row in enumerate(order):
        if not state.holds[row] and not table.is_held[row]:
            lower = [r for r in order[place + 1 :] if state.holds[r] and table.is_held[r] and table.is_preemptible[r]]
            assert table.gpus[row] > state.free + sum(table.gpus[r] for r in lower), "he could have pushed"
    for row in np.flatnonzero(table.is_held & ~table.is_preemptible):
        assert state.holds[row]
