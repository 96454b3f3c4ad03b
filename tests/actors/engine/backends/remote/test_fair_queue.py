from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.engine.backends.remote.fair_queue import FairQueue

TEAMS = ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(TEAMS), st.integers(1, 50), st.integers(-2, 2)),
        st.tuples(st.just("pop"), st.just(""), st.just(0), st.just(0)),
        st.tuples(st.just("remove"), st.just(""), st.integers(0, 100), st.just(0)),
    ),
    max_size=80,
)


class Request:
    def __init__(self, team: str, tokens: int, priority: int, number: int) -> None:
        self.team, self.tokens, self.priority, self.number = team, tokens, priority, number


@given(STEPS)
def test_each_request_goes_once_and_in_the_order_of_its_team(steps: list[tuple[str, str, int, int]]) -> None:
    queue: FairQueue[Request] = FairQueue()
    waiting: list[Request] = []
    for number, (what, team, tokens, priority) in enumerate(steps):
        if what == "push":
            waiting.append(Request(team, tokens, priority, number))
            queue.push(waiting[-1], team, tokens, priority=priority)
        elif what == "remove" and waiting:
            gone = waiting.pop(tokens % len(waiting))
            assert queue.remove(gone)
            assert not queue.remove(gone)
        elif what == "pop" and waiting:
            found = queue.head()
            assert queue.pop() is found is not None
            assert found.priority == min(each.priority for each in waiting)
            of_team = [each for each in waiting if each.team == found.team]
            assert found is min(of_team, key=lambda each: (each.priority, each.number))
            waiting.remove(found)
        assert len(queue) == len(waiting)
    assert sorted(queue.pop().number for _ in range(len(queue))) == sorted(each.number for each in waiting)
    with pytest.raises(IndexError):
        queue.pop()


@given(STEPS)
def test_a_light_tenant_never_waits_behind_the_backlog_of_others(steps: list[tuple[str, str, int, int]]) -> None:
    """However the queue came to be, a team that had nothing waiting and owes nothing waits for one request of each
    other team at most, beside the more urgent ones."""
    queue: FairQueue[Request] = FairQueue()
    for number, (what, team, tokens, priority) in enumerate(steps):
        if what == "push":
            queue.push(Request(team, tokens, priority, number), team, tokens, priority=priority)
        elif len(queue):
            queue.pop()
    queue.push(light := Request("light", 10**6, 0, 999), "light", 10**6)
    before = []
    while (found := queue.pop()) is not light:
        if found.priority == 0:
            before.append(found.team)
        else:
            assert found.priority < 0
    assert len(before) == len(set(before))


@given(
    st.lists(st.integers(1, 50), min_size=40, max_size=40),
    st.lists(st.integers(1, 50), min_size=40, max_size=40),
    st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)
def test_teams_that_always_wait_get_tokens_by_their_weight(a: list[int], b: list[int], weight: float) -> None:
    """The difference stays below one request of each (the bound of start-time fair queueing)."""
    queue: FairQueue[Request] = FairQueue()
    for team, lengths, of_team in (("a", a, 1.0), ("b", b, weight)):
        for number, tokens in enumerate(lengths):
            queue.push(Request(team, tokens, 0, number), team, tokens, weight=of_team)
    served, left = {"a": 0.0, "b": 0.0}, {"a": 40, "b": 40}
    bound = max(a) + max(b) / weight
    while all(left.values()):
        found = queue.pop()
        left[found.team] -= 1
        served[found.team] += found.tokens / (1.0 if found.team == "a" else weight)
        assert abs(served["a"] - served["b"]) <= bound


def test_a_team_pays_for_what_it_is_served_later() -> None:
    queue: FairQueue[str] = FairQueue()
    for team in ("a", "b"):
        for number in range(4):
            queue.push(f"{team}{number}", team, 10)
    assert [queue.pop(), queue.pop()] == ["a0", "b0"]
    queue.charge("a", 15)
    assert [queue.pop() for _ in range(3)] == ["b1", "b2", "a1"]


def test_a_request_that_comes_again_is_the_first_of_its_team_and_costs_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in ("a0", "a1", "b0", "b1"):
        queue.push(name, name[0], 10)
    assert [queue.pop(), queue.pop()] == ["a0", "b0"]
    queue.push("a0", "a", 0, again=True)
    assert [queue.pop() for _ in range(3)] == ["b1", "a0", "a1"]


def test_what_was_owed_is_forgotten_when_nobody_waits() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a0", "a", 10**9)
    queue.pop()
    queue.push("a1", "a", 1)
    queue.push("b0", "b", 1)
    assert queue.pop() == "a1"
