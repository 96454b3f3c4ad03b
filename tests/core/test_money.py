from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.money import cumulative, format_usd, interval_cost, micro_usd, split, to_us

prices = st.integers(0, 10**12)
instants = st.integers(0, 4 * 10**15)


@given(prices, st.lists(instants, min_size=2, max_size=20).map(sorted))
def test_pieces_of_a_lifetime_sum_to_the_whole(price: int, cuts: list[int]) -> None:
    pieces = [interval_cost(price, cuts[0], a, b) for a, b in pairwise(cuts)]
    assert sum(pieces) == cumulative(price, cuts[0], cuts[-1])
    assert all(piece >= 0 for piece in pieces)


@given(st.integers(0, 10**15), st.dictionaries(st.text(max_size=5), st.floats(1e-9, 1e9), min_size=1, max_size=8))
def test_a_split_sums_to_the_whole_and_nobody_is_off_by_more_than_one(amount: int, weights: dict[str, float]) -> None:
    parts = split(amount, weights)
    assert sum(parts.values()) == amount
    total = sum(weights.values())
    assert all(abs(parts[key] - amount * weight / total) <= 1 + amount * 1e-12 for key, weight in weights.items())


def test_ties_go_to_the_smaller_key() -> None:
    assert split(1, {"b": 1.0, "a": 1.0}) == {"a": 1, "b": 0}


def test_nothing_cannot_be_split_by_nothing() -> None:
    with pytest.raises(ValueError, match="more than zero"):
        split(5, {"a": 0.0})


def test_an_interval_has_a_direction() -> None:
    with pytest.raises(ValueError, match="cannot end"):
        cumulative(1, 2, 1)


def test_dollars_hours_and_microseconds() -> None:
    assert micro_usd("3.06") == 3_060_000
    assert to_us(1.5) == 1_500_000
    assert cumulative(3_060_000, 0, 3_600_000_000) == 3_060_000


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "$0.00"), (1_234_567_890, "$1,234.57"), (99_999, "$0.099999"), (1, "$0.000001")]
)
def test_small_amounts_do_not_look_free(amount: int, text: str) -> None:
    assert format_usd(amount) == text
