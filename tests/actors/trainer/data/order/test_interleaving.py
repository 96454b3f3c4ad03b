"""The closed form by which sources take turns, against exact shares and against itself in other cuts."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raytide.actors.trainer.data.order.interleaving import PRECISION, Interleaving, _Node

weight_lists = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.sampled_from([1.0, 1e-3, 1e-6]), min_size=1, max_size=12),
    st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=20),
)
indices = st.one_of(st.integers(0, 10_000), st.integers(0, 10**11))


def deviations(mix: Interleaving, first: int, count: int) -> np.ndarray:
    """The difference of each source's count from its exact share, after each of `count` samples from `first` on."""
    sources, _ = mix.draw(first, count)
    total = sum(mix.weights)
    began = [float(n - Fraction(first * w, total)) for n, w in zip(mix.counts(first), mix.weights, strict=True)]
    drawn = np.cumsum(np.arange(len(mix.weights)) == sources[:, None], axis=0)
    exact = np.arange(1, count + 1)[:, None] * np.asarray([w / total for w in mix.weights])
    deviation: np.ndarray = np.asarray(began) + drawn - exact
    return deviation


def error_bound(node: _Node | int, error: float = 0.0) -> float:
    """The most samples by which a count differs from its exact share: an error e at a node becomes p * e + 1/2 at a
    child with share p.
    """
    if isinstance(node, int):
        return error
    left = node.left_weight / node.weight
    return max(error_bound(node.left, left * error + 0.5), error_bound(node.right, (1 - left) * error + 0.5))


@given(weights=weight_lists, first=indices)
@settings(max_examples=150, deadline=None)
def test_counts_are_within_a_sample_and_a_half_of_exact_at_every_step(weights: list[float], first: int) -> None:
    mix = Interleaving(weights)
    bound = error_bound(mix._tree)
    assert bound <= 1.5  # the worst weights that a search over these lists found have 1.25
    assert np.abs(deviations(mix, first, 300)).max() <= bound + 1e-6


@given(weights=weight_lists, first=indices, cut=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_any_cut_of_the_stream_gives_the_same_samples(weights: list[float], first: int, cut: int) -> None:
    mix = Interleaving(weights)
    sources, positions = mix.draw(first, 60)
    for begin, count in ((0, cut), (cut, 60 - cut)):
        again = mix.draw(first + begin, count)
        assert np.array_equal(again[0], sources[begin : begin + count])
        assert np.array_equal(again[1], positions[begin : begin + count])


@given(weights=weight_lists)
@settings(max_examples=60, deadline=None)
def test_each_source_gives_its_rows_in_turn(weights: list[float]) -> None:
    mix = Interleaving(weights)
    sources, positions = mix.draw(0, 500)
    for source in range(len(weights)):
        assert positions[sources == source].tolist() == list(range(mix.counts(500)[source]))


def test_a_source_without_weight_is_never_drawn() -> None:
    mix = Interleaving([0.0, 2.0, 0.0, 1.0])
    assert mix.counts(300) == (0, 200, 0, 100)
    assert set(mix.draw(0, 300)[0].tolist()) == {1, 3}


def test_many_sources_keep_the_bound() -> None:
    random = np.random.default_rng(0)
    assert error_bound(Interleaving(random.random(64))._tree) <= 1.2
    assert error_bound(Interleaving(10.0 ** random.uniform(-6, 0, 64))._tree) <= 1.2


def test_weights_keep_their_proportion_over_long_runs() -> None:
    mix = Interleaving([0.1, 0.2, 0.7])
    assert sum(mix.weights) == PRECISION
    for count, share in zip(mix.counts(10**10), [0.1, 0.2, 0.7], strict=True):
        assert abs(count - share * 10**10) < 1.2


def test_the_order_never_changes_between_releases() -> None:
    """A resume by a later release must see the same stream: these are what the first release gave."""
    assert Interleaving([0.5, 0.3, 0.2]).draw(0, 12)[0].tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1]
