"""A node is idle when Ray says so, and its meters do, by fresh words, for as long as its type asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.autoscaler.nodes.idleness import IdleClock
from raytide.core.objects.node import FRESH_S, Meter, NodeType, Signal

GPU8 = NodeType(
    name="gpu8", resources={"GPU": 8}, price_micro_usd_h=1, idle_timeout_s=20, busy_above={"gpu": 0.05, "cpu": 0.5}
)
BARE = GPU8.model_copy(update={"busy_above": {}})


def use(gpu: float, at_s: float, cpu: float = 0.0) -> dict[Meter, Signal]:
    return {"gpu": Signal(gpu, at_s), "cpu": Signal(cpu, at_s)}


def held(words: list[dict[Meter, Signal]], now_s: float) -> str:
    clock = IdleClock()
    for word in words:
        clock = clock.observe_meters({"n": word}, {"n": GPU8})
    return clock.busy_reason("n", GPU8, words[-1], now_s)


def quiet(until_s: float) -> list[dict[Meter, Signal]]:
    return [use(0.0, at_s) for at_s in range(0, int(until_s) + 1, 5)]


def test_a_type_without_meters_is_held_by_nothing() -> None:
    assert IdleClock().observe_meters({}, {"n": BARE}).busy_reason("n", BARE, {}, 100.0) == ""


def test_quiet_for_long_enough_by_fresh_words_is_idle() -> None:
    assert held(quiet(20), 22.0) == ""
    assert "only since 00:00:00 UTC" in held(quiet(15), 22.0)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (use(0.97, 20.0), "its GPU is in use, over 5%"),
        (use(0.0, 20.0, cpu=0.9), "its CPU is in use, over 50%"),
        (use(0.0, 5.0), "its GPU use was last measured at 00:00:05 UTC, over 10 s ago"),
        ({"gpu": Signal(0.0, 20.0)}, "its CPU use was never measured"),
    ],
)
def test_what_holds_a_node_is_said(last: dict[Meter, Signal], words: str) -> None:
    assert words in held([*quiet(20), last], 22.0)


def test_quiet_begins_anew_after_work_and_after_a_silence_of_which_nobody_knows() -> None:
    assert held([*quiet(20), use(0.9, 25.0), use(0.0, 30.0), use(0.0, 35.0)], 36.0) != ""
    assert "only since 00:01:00 UTC" in held([*quiet(20), use(0.0, 60.0)], 61.0)


def test_the_words_stay_the_same_while_the_same_is_true() -> None:
    busy, silent = [use(0.9, at_s) for at_s in (20.0, 25.0)], quiet(5)
    assert held(busy[:1], 21.0) == held(busy, 26.0)
    assert held(silent, 30.0) == held(silent, 300.0)


@given(
    steps=st.lists(st.tuples(st.floats(0.5, 30), st.sampled_from([0.0, 0.02, 0.9, None])), max_size=40),
    late_s=st.floats(0, 100),
)
def test_a_node_is_let_go_only_on_fresh_words_of_unbroken_quiet(
    steps: list[tuple[float, float | None]], late_s: float
) -> None:
    """None is a look at which the meters said nothing new."""
    clock, now_s, word = IdleClock(), 0.0, use(0.9, 0.0)
    unbroken: list[float] = []
    for dt_s, gpu in steps:
        now_s += dt_s
        if gpu is not None:
            word = use(gpu, now_s)
            if gpu > 0.05 or (unbroken and now_s - unbroken[-1] > FRESH_S):
                unbroken = []
            if gpu <= 0.05:
                unbroken.append(now_s)
        clock = clock.observe_meters({"n": word}, {"n": GPU8})
    is_quiet = bool(unbroken) and unbroken[-1] - unbroken[0] >= GPU8.idle_timeout_s
    is_fresh = bool(unbroken) and now_s + late_s - unbroken[-1] <= FRESH_S
    assert (clock.busy_reason("n", GPU8, word, now_s + late_s) == "") == (is_quiet and is_fresh)
