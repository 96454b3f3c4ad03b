from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.engine.backends.remote.deadline_queue import LATE_EVERY, DeadlineQueue

SLO_S = 10.0
REQUESTS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=60)
"""Seconds since the arrival before, and seconds to the first token."""


def first_tokens_s(requests: Sequence[tuple[int, int]], slo_s: float) -> list[float]:
    """Returns the times from arrival to first token on one server, which serves one request after another."""
    queue: DeadlineQueue[int] = DeadlineQueue()
    arrivals_s, at_s = [], 0.0
    for gap_s, _ in requests:
        arrivals_s.append(at_s := at_s + gap_s)
    waits_s, now_s, arrived = [0.0] * len(requests), 0.0, 0
    for _ in requests:
        if not queue:
            now_s = max(now_s, arrivals_s[arrived])
        while arrived < len(requests) and arrivals_s[arrived] <= now_s:
            queue.push(arrived, due_s=arrivals_s[arrived] + slo_s, needs_s=requests[arrived][1])
            arrived += 1
        job = queue.pop(now_s)
        now_s += requests[job][1]
        waits_s[job] = now_s - arrivals_s[job]
    return waits_s


@given(REQUESTS)
def test_no_request_that_is_in_time_first_come_first_served_is_late(requests: list[tuple[int, int]]) -> None:
    ordered, first_come = first_tokens_s(requests, SLO_S), first_tokens_s(requests, float("inf"))
    for ours_s, theirs_s in zip(ordered, first_come, strict=True):
        assert theirs_s > SLO_S or ours_s <= SLO_S


@given(REQUESTS)
def test_the_order_of_arrival_holds_while_all_are_in_time(requests: list[tuple[int, int]]) -> None:
    first_come = first_tokens_s(requests, float("inf"))
    if max(first_come) <= SLO_S:
        assert first_tokens_s(requests, SLO_S) == first_come


def test_a_backlog_makes_only_the_excess_late() -> None:
    """A hundred requests at once on a server that has time for ten; then one every second."""
    requests = [(0, 1)] * 100 + [(1, 1)] * 200
    late = sum(waited_s > SLO_S for waited_s in first_tokens_s(requests, SLO_S))
    assert sum(waited_s > SLO_S for waited_s in first_tokens_s(requests, float("inf"))) == 290
    assert 90 <= late <= 90 + 200 / LATE_EVERY + 1


def test_late_requests_keep_a_share_of_the_starts() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue()
    for number in range(3):
        queue.push(f"late-{number}", due_s=1.0)
    served = []
    for number in range(4 * LATE_EVERY):
        queue.push(f"new-{number}", due_s=100.0 + number)
        served.append(queue.pop(50.0))
    assert [at for at, name in enumerate(served) if name.startswith("late")] == [
        LATE_EVERY - 1,
        2 * LATE_EVERY - 1,
        3 * LATE_EVERY - 1,
    ]
    assert [name for name in served if name.startswith("late")] == ["late-0", "late-1", "late-2"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 5), st.booleans()), max_size=80))
def test_each_request_goes_once(steps: list[tuple[bool, int, int, bool]]) -> None:
    queue: DeadlineQueue[int] = DeadlineQueue()
    waiting: list[int] = []
    for number, (is_push, due_s, needs_s, is_first) in enumerate(steps):
        if is_push:
            queue.push(number, due_s=due_s, needs_s=needs_s, first=is_first)
            waiting.append(number)
        elif waiting:
            now_s = number / 4
            found = queue.head(now_s)
            assert queue.pop(now_s) == found
            waiting.remove(found)
        if len(waiting) > 3:
            gone = waiting.pop(due_s % len(waiting))
            assert queue.remove(lambda each, gone=gone: each == gone)  # type: ignore[misc]
            assert not queue.remove(lambda each, gone=gone: each == gone)  # type: ignore[misc]
        assert len(queue) == len(waiting)
    assert sorted(queue.pop(99.0) for _ in waiting) == waiting
    with pytest.raises(IndexError):
        queue.pop()


def test_one_that_lost_its_place_goes_first_and_is_never_late() -> None:
    queue: DeadlineQueue[str] = DeadlineQueue()
    queue.push("new", due_s=100.0)
    queue.push("again", due_s=1.0, first=True)
    assert [queue.pop(50.0), queue.pop(50.0)] == ["again", "new"]
