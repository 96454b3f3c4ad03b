"""Wall time without its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.clock import MOST_S, SLEW, SteadyClock


class Machine:
    """Its wall clock may be set; its monotonic one goes on."""

    def __init__(self, wall_s: float = 1e9) -> None:
        self.wall_s, self.monotonic_s = wall_s, 50.0
        self.clock = SteadyClock(lambda: self.wall_s, lambda: self.monotonic_s)

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds

    def now_s(self) -> float:
        return self.clock.read()[0]


def test_it_follows_the_wall_clock_and_its_small_corrections_at_once() -> None:
    machine = Machine()
    machine.pass_s(100.0)
    assert machine.now_s() == 1e9 + 100.0
    machine.pass_s(1.0)
    machine.wall_s += 0.5
    assert machine.clock.read() == (1e9 + 101.5, 0.0)
    machine.wall_s -= 0.5
    before_s = machine.now_s()
    assert before_s == 1e9 + 101.5, "it does not go back"
    machine.pass_s(1.0)
    assert machine.now_s() == 1e9 + 102.0


def test_an_hour_is_taken_up_in_four() -> None:
    for step_s in (3600.0, -3600.0):
        machine = Machine()
        machine.wall_s += step_s
        assert machine.clock.read() == (1e9, step_s)
        for _ in range(1000):
            machine.pass_s(3.6)
            ahead_s = machine.clock.read()[1]
        assert abs(ahead_s) == pytest.approx(3600.0 * (1 - SLEW))
        for _ in range(3000):
            machine.pass_s(3.6)
            machine.now_s()
        machine.pass_s(3.6)
        assert machine.clock.read()[1] == pytest.approx(0.0)
        assert machine.now_s() == pytest.approx(machine.wall_s)


def test_a_process_goes_on_where_the_one_before_it_was() -> None:
    machine = Machine()
    machine.clock.go_on_from(1e9 + 3600.0)
    assert machine.now_s() == 1e9 + 3600.0
    machine.clock.go_on_from(1e9)
    assert machine.now_s() == 1e9 + 3600.0
    machine.clock.go_on_from(1e9 + 3 * MOST_S)
    assert machine.now_s() == 1e9 + 3600.0, "that clock was wrong"


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(-1e5, 1e5)), max_size=30))
def test_it_never_goes_back_and_durations_are_true_to_the_slew(moves: list[tuple[float, float]]) -> None:
    machine = Machine()
    before_s = machine.now_s()
    for passed_s, step_s in moves:
        machine.pass_s(passed_s)
        machine.wall_s += step_s
        now_s = machine.now_s()
        assert now_s >= before_s
        assert abs(now_s - before_s - passed_s) <= max(1.0, SLEW * passed_s) + 1e-3
        before_s = now_s
