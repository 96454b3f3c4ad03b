from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raytide.registry.rollout.canary import (
    CanaryDecision,
    CanarySpec,
    CanaryState,
    CanaryStep,
    RevisionCounts,
    begin,
    decide,
)

SPEC = CanarySpec()
Draw = Callable[[random.Random, int], RevisionCounts]


def counts(rng: random.Random, n: int, errors: float = 0.0, late: float = 0.0, disliked: float = 0.0) -> RevisionCounts:
    bad = [sum(rng.random() < share for _ in range(n)) for share in (errors, late, disliked)]
    return RevisionCounts(n, bad[0], n, bad[1], n, bad[2])


def run(
    seed: int, champion: Draw, challenger: Draw, spec: CanarySpec = SPEC, per_s: int = 20
) -> Iterator[tuple[float, CanaryDecision]]:
    """Yields the time and the decision at each second, with `per_s` requests a second split as decided."""
    rng, now_s = random.Random(seed), 0.0
    state, decision = begin(spec, now_s)
    yield now_s, decision
    while decision.action not in ("complete", "roll_back") and now_s < 7200:
        now_s += 1.0
        to_new = sum(rng.random() < decision.percent / 100 for _ in range(per_s))
        state, decision = decide(spec, state, champion(rng, per_s - to_new), challenger(rng, to_new), now_s)
        yield now_s, decision


def test_a_challenger_that_is_as_good_gets_all_traffic_step_by_step() -> None:
    seen = list(run(0, counts, counts))
    percents = [decision.percent for _, decision in seen]
    assert percents == sorted(percents)
    assert set(percents) == {5.0, 25.0, 50.0, 100.0}
    assert seen[-1][1].action == "complete"
    assert [x.percent for _, x in seen if x.action == "advance"] == [5.0, 25.0, 50.0, 100.0]


@pytest.mark.parametrize("what", ["errors", "late", "disliked"])
def test_a_challenger_that_is_broken_is_rolled_back_within_a_minute(what: str) -> None:
    """At 20 requests a second, one of which goes to the challenger in the first step."""
    for seed in range(20):
        *_, (now_s, last) = run(
            seed, lambda rng, n: counts(rng, n, 0.01, 0.01, 0.01), lambda rng, n: counts(rng, n, **{what: 0.5})
        )
        assert (last.action, last.percent) == ("roll_back", 0.0)
        assert now_s <= 60
        assert "of the champion" in last.reason


def test_equal_revisions_are_rolled_back_no_more_often_than_alpha_says() -> None:
    """200 seeds with a high alpha, so that a violation would show."""
    spec = CanarySpec(alpha=0.05, tolerance=0.0, steps=tuple(CanaryStep(percent=p) for p in (5, 25, 50)))
    ends = [[*run(seed, _flaky, _flaky, spec)][-1][1].action for seed in range(200)]
    assert ends.count("roll_back") <= 10
    assert ends.count("roll_back") + ends.count("complete") == 200


def test_a_step_of_all_traffic_compares_with_what_the_champion_did() -> None:
    spec = CanarySpec(steps=(CanaryStep(percent=50), CanaryStep(percent=100, for_s=600)))
    ends = [[*run(seed, _flaky, _flaky, spec)][-1][1].action for seed in range(30)]
    assert ends == ["complete"] * 30

    def breaks_later(rng: random.Random, n: int) -> RevisionCounts:
        return counts(rng, n, errors=0.5 if n == 20 else 0.03)  # with all traffic

    *_, (now_s, last) = run(0, _flaky, breaks_later, spec)
    assert last.action == "roll_back"
    assert 60 < now_s < 90


def test_an_excess_within_the_tolerance_is_accepted() -> None:
    spec = CanarySpec(tolerance=0.1)
    *_, (_, last) = run(0, lambda rng, n: counts(rng, n, 0.01), lambda rng, n: counts(rng, n, 0.06), spec)
    assert last.action == "complete"


def test_a_step_waits_for_its_time_and_its_requests() -> None:
    state, _ = begin(SPEC, 0.0)
    state, decision = decide(SPEC, state, RevisionCounts(1000), RevisionCounts(99), 100.0)
    assert (decision.action, decision.reason) == ("hold", "5 % for another 1 requests")
    _, decision = decide(SPEC, CanaryState(0, 0.0), RevisionCounts(1000), RevisionCounts(500), 59.0)
    assert (decision.action, decision.reason) == ("hold", "5 % for another 1 s")
    state, decision = decide(SPEC, state, RevisionCounts(), RevisionCounts(1), 101.0)
    assert (decision.action, decision.percent, state.step, state.since_s) == ("advance", 25.0, 1, 101.0)
    assert state.requests == 0


@given(
    blocks=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1), st.floats(0, 30)),
        max_size=40,
    )
)
def test_traffic_never_falls_but_to_nothing(blocks: list[tuple[int, int, float, float, float]]) -> None:
    spec = CanarySpec(steps=tuple(CanaryStep(percent=p, for_s=5, requests=5) for p in (10, 40, 100)))
    now_s, percent = 0.0, 0.0
    state, decision = begin(spec, now_s)
    for n_a, n_b, bad_a, bad_b, pause_s in blocks:
        assert decision.percent >= percent or decision.action == "roll_back"
        percent = decision.percent
        if decision.action in ("roll_back", "complete"):
            assert decision.percent == (0.0 if decision.action == "roll_back" else 100.0)
            return
        now_s += pause_s
        a, b = RevisionCounts(n_a, int(n_a * bad_a)), RevisionCounts(n_b, int(n_b * bad_b))
        state, decision = decide(spec, state, a, b, now_s)


@pytest.mark.parametrize("percents", [(), (5, 5), (25, 5), (0,), (101,)])
def test_steps_rise_up_to_all_traffic(percents: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        CanarySpec.model_validate({"steps": [{"percent": percent} for percent in percents]})


def _flaky(rng: random.Random, n: int) -> RevisionCounts:
    return counts(rng, n, 0.03, 0.1, 0.2)
