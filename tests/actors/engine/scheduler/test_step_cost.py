"""Step costs follow what is measured, and forget what was measured long ago."""

import pytest

from raytide.actors.engine.scheduler.step_cost import StepCost


def learned(seconds: dict[int, float], times: int = 30) -> StepCost:
    cost = StepCost()
    for _ in range(times):
        for rows, each in seconds.items():
            cost.observe(rows, each)
    return cost


def test_measured_steps_are_believed_and_others_lie_between() -> None:
    cost = learned({1: 3.0, 9: 9.0})
    assert cost.seconds(1) == pytest.approx(3.0)
    assert cost.seconds(9) == pytest.approx(9.0)
    estimates = [cost.seconds(rows) for rows in range(1, 30)]
    assert estimates == sorted(estimates)


def test_before_a_measurement_of_more_rows_they_are_guessed_from_fewer() -> None:
    cost = learned({1: 3.0})
    assert cost.seconds(5) == pytest.approx(3.0 * (1 + 4 * 0.25))


def test_a_step_that_the_machine_interrupted_changes_little() -> None:
    cost = learned({1: 3.0, 9: 9.0})
    cost.observe(9, 9000.0)
    assert cost.seconds(9) < 9.0 * 1.3


def test_a_first_measurement_that_was_interrupted_is_not_believed_whole() -> None:
    cost = learned({1: 3.0})
    cost.observe(9, 9000.0)
    assert cost.seconds(9) == pytest.approx(2 * 3.0 * 3)


def test_what_is_not_measured_for_long_is_guessed_anew() -> None:
    cost = learned({1: 3.0, 9: 90.0}, times=120)
    slow = cost.seconds(9)
    for _ in range(600):
        cost.observe(1, 3.0)
    assert cost.seconds(9) == pytest.approx(9.0)
    assert slow > 80.0


def test_many_rows_are_remembered_in_few_places() -> None:
    cost = learned({rows: 1.0 * rows for rows in range(1, 1000)}, times=1)
    assert len(cost._rows) < 80
