from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raytide.registry.rollout.traffic import GROUPS, SLOTS, TrafficSplit, slot_of

USERS = [f"user-{number}" for number in range(20_000)]


def split(percent: float = 0.0, **fields: object) -> TrafficSplit:
    given = {"endpoint": "chat", "champion": 3, "challenger": 4, "percent": percent, **fields}
    return TrafficSplit.model_validate(given)


@pytest.mark.parametrize("percent", [0, 0.01, 5, 25, 50, 100])
def test_the_challenger_answers_its_share_of_users(percent: float) -> None:
    seen = sum(split(percent).revision_of(user) == 4 for user in USERS) / len(USERS)
    assert seen == pytest.approx(percent / 100, abs=0.01)
    assert (seen == 0.0) is (percent == 0) or percent == 0.01
    assert seen < 1 or percent == 100


@given(unit=st.text(), low=st.floats(0, 100), high=st.floats(0, 100))
def test_a_user_of_the_challenger_stays_with_it_while_its_share_rises(unit: str, low: float, high: float) -> None:
    low, high = sorted((low, high))
    if split(low).revision_of(unit) == 4:
        assert split(high).revision_of(unit) == 4


def test_the_slot_of_a_user_is_the_same_everywhere_and_always() -> None:
    assert [slot_of(unit, "chat/4") for unit in ("ana", "bob", "\ud800")] == [8896, 1972, 6589]


def test_rollouts_do_not_begin_with_the_same_users() -> None:
    first = {user for user in USERS if split(10).revision_of(user) == 4}
    second = {user for user in USERS if split(10, challenger=5).revision_of(user) == 5}
    assert len(first & second) / len(first) == pytest.approx(0.1, abs=0.03)


def test_slots_are_even_and_each_arm_has_users_in_all_groups() -> None:
    slots = [slot_of(user, "x") for user in USERS]
    per_tenth = [sum(slot // (SLOTS // 10) == tenth for slot in slots) for tenth in range(10)]
    assert max(per_tenth) < 1.1 * min(per_tenth)
    even = split(50)
    for revision in (3, 4):
        assert {even.group_of(user) for user in USERS if even.revision_of(user) == revision} == set(range(GROUPS))


def test_shadows_are_a_share_of_requests_that_does_not_follow_the_users() -> None:
    shadowed = split(shadow_percent=20)
    seen = [user for user in USERS if shadowed.is_shadowed(user)]
    assert len(seen) / len(USERS) == pytest.approx(0.2, abs=0.01)
    assert not split().is_shadowed("r")
    early = sum(shadowed._slot(user) < SLOTS // 5 for user in seen) / len(seen)
    assert early == pytest.approx(0.2, abs=0.02)


def test_a_split_has_two_revisions_and_is_read_back() -> None:
    with pytest.raises(ValidationError, match="the same revision"):
        split(challenger=3)
    assert TrafficSplit.model_validate_json(split(5).model_dump_json()) == split(5)
