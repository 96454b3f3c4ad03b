"""Mixtures: shares, caps, phases and what each step draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from raytide.actors.trainer.data.order.mixture import (
    MixtureSampler,
    Phase,
    SourceSize,
    capped_shares,
    resolve_phases,
)
from raytide.core.errors import DataError
from raytide.core.specs.mixture import MixturePhase, MixtureSource, MixtureSpec


def spec_of(*weights: float | None, **fields: object) -> MixtureSpec:
    sources = [{"dataset": f"/data/s{i}", "weight": weight} for i, weight in enumerate(weights)]
    return MixtureSpec.model_validate({"sources": sources, **fields})


def sizes_of(*rows: int, tokens_per_row: int = 10) -> tuple[SourceSize, ...]:
    return tuple(SourceSize(f"s{i}", count, count * tokens_per_row) for i, count in enumerate(rows))


def sampler(spec: MixtureSpec, sizes: tuple[SourceSize, ...], batch: int, steps: int, seed: int = 0) -> MixtureSampler:
    return MixtureSampler(seed, sizes, resolve_phases(spec, sizes, batch, steps), batch)


def drawn(mix: MixtureSampler, steps: range) -> np.ndarray:
    """The number of rows of each source in each step, [steps, sources]."""
    ends = np.cumsum([source.rows for source in mix.sources])
    of = [np.searchsorted(ends, mix.ids(step), side="right") for step in steps]
    return np.stack([np.bincount(each, minlength=len(ends)) for each in of])


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    later=st.lists(st.floats(0.01, 1), min_size=6, max_size=6),
    change=st.integers(1, 20),
    batch=st.integers(1, 16),
)
@settings(max_examples=60, deadline=None)
def test_every_source_goes_through_its_rows_epoch_by_epoch(
    weights: list[float], later: list[float], change: int, batch: int
) -> None:
    phase = {"from_step": change, "weights": {f"s{i}": later[i] for i in range(len(weights))}}
    sizes = sizes_of(*(7 + 5 * i for i in range(len(weights))))
    mix = sampler(spec_of(*weights, phases=[phase]), sizes, batch, 40)
    stream, offset = np.concatenate([mix.ids(step) for step in range(40)]), 0
    for source in sizes:
        rows = stream[(stream >= offset) & (stream < offset + source.rows)] - offset
        assert mix.counts(40)[source.name] == len(rows)
        for start in range(0, len(rows), source.rows):
            epoch = rows[start : start + source.rows].tolist()
            assert len(set(epoch)) == len(epoch)
        offset += source.rows
    assert len(stream) == 40 * batch


def test_a_phase_draws_by_its_own_weights_and_goes_on_where_the_sources_are() -> None:
    phases = [
        {"from_step": 10, "weights": {"s0": 1, "s2": 3}},
        {"from_step": 20, "weights": {"s1": 1}},
    ]
    mix = sampler(spec_of(1, 1, 0, phases=phases), sizes_of(1000, 1000, 1000), 8, 30)
    counts = drawn(mix, range(30))
    assert counts[:10].sum(0).tolist() == [40, 40, 0]
    assert counts[10:20].sum(0).tolist() == [20, 0, 60]
    assert counts[20:].sum(0).tolist() == [0, 80, 0]
    ids = np.concatenate([mix.ids(step) for step in range(30)])
    assert len(set(ids.tolist())) == 240  # nothing is drawn twice before its source is used up


def test_weights_are_of_tokens_even_if_rows_are_fuller_in_one_source() -> None:
    sizes = (SourceSize("s0", 1000, 10_000), SourceSize("s1", 1000, 5_000))
    counts = sampler(spec_of(1, 1), sizes, 30, 10).counts(10)
    assert counts == {"s0": 100, "s1": 200}


def test_without_weights_sources_count_by_their_tokens_and_temperature_evens_them_out() -> None:
    sizes = sizes_of(100, 800)
    assert sampler(spec_of(None, None), sizes, 9, 10).counts(10) == {"s0": 10, "s1": 80}
    evened = sampler(spec_of(None, None, temperature=3.0), sizes, 9, 10).counts(10)
    assert evened == {"s0": 30, "s1": 60}  # 1 : 8 ** (1/3)


def test_epochs_stand_for_a_weight() -> None:
    spec = MixtureSpec(
        sources=(MixtureSource(dataset="/a", name="s0", epochs=4.0), MixtureSource(dataset="/b", name="s1"))
    )
    assert sampler(spec, sizes_of(100, 400), 8, 100).counts(100) == {"s0": 400, "s1": 400}


def test_a_cap_holds_over_all_phases_and_the_rest_goes_to_the_others() -> None:
    phases = [{"from_step": 50, "weights": {"s0": 9, "s1": 1}}]
    mix = sampler(spec_of(1, 1, max_epochs=2.0, phases=phases), sizes_of(100, 10_000), 8, 100)
    counts = mix.counts(100)
    assert abs(counts["s0"] - 200) <= 2
    assert counts["s0"] + counts["s1"] == 800


def test_caps_that_leave_too_little_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"max_epochs allows 200 more sequences from step 0 on, and the mixture needs 80"
    ):
        sampler(spec_of(1, 1, max_epochs=1.0), sizes_of(100, 100), 8, 100)


@given(
    shares=st.lists(st.floats(0.001, 1), min_size=1, max_size=8),
    limits=st.lists(st.floats(0.01, 2), min_size=8, max_size=8),
)
def test_water_filling_keeps_limits_and_proportions(shares: list[float], limits: list[float]) -> None:
    limits = limits[: len(shares)]
    found = capped_shares(shares, limits)
    if found is None:
        assert sum(min(1.0, limit) for limit in limits) < 1 + 1e-9
        return
    assert abs(sum(found) - 1) < 1e-9
    assert all(share <= limit + 1e-12 for share, limit in zip(found, limits, strict=True))
    open_rates = {round(f / s, 9) for f, s, limit in zip(found, shares, limits, strict=True) if f < limit}
    assert len(open_rates) <= 1


def test_the_same_rows_whatever_steps_are_read_before() -> None:
    mix = sampler(spec_of(3, 1, 2), sizes_of(50, 60, 70), 16, 100, seed=5)
    later = mix.ids(77)
    for step in (3, 50, 76):
        mix.ids(step)
    assert np.array_equal(mix.ids(77), later)
    assert not np.array_equal(sampler(spec_of(3, 1, 2), sizes_of(50, 60, 70), 16, 100, seed=6).ids(77), later)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sources": [{"dataset": "/a", "weight": 0}]}, "all weights are zero"),
        ({"sources": [{"dataset": "/a", "weight": -1}]}, "greater than or equal to 0"),
        ({"sources": [{"dataset": "/a"}, {"dataset": "/x/a"}]}, "two sources have the same name"),
        ({"sources": [{"dataset": "/a", "weight": 1}, {"dataset": "/b"}]}, "give all sources a weight, or none"),
        ({"sources": [{"dataset": "/a", "weight": 1, "epochs": 2}]}, "give weight or epochs"),
        (
            {"sources": [{"dataset": "/a"}], "phases": [{"from_step": 3, "weights": {"c": 1}}]},
            "names the source 'c', which is none of a",
        ),
        (
            {"sources": [{"dataset": "/a"}], "phases": [{"from_step": 3, "weights": {"a": 0}}]},
            "all weights of the phase from step 3 are zero",
        ),
        (
            {"sources": [{"dataset": "/a"}], "phases": [{"from_step": 3, "weights": {"a": -1}}]},
            "a weight lies between",
        ),
        (
            {
                "sources": [{"dataset": "/a"}],
                "phases": [{"from_step": 3, "weights": {"a": 1}}, {"from_step": 3, "weights": {"a": 2}}],
            },
            "in the order of from_step",
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        MixtureSpec.model_validate(fields)


def test_the_order_never_changes_between_releases() -> None:
    sizes = (SourceSize("a", 10, 10), SourceSize("b", 7, 7))
    mix = MixtureSampler(0, sizes, (Phase(0, (0.7, 0.3), (0, 0)),), 6)
    assert mix.ids(3).tolist() == [14, 7, 2, 10, 4, 5]


def test_a_phase_is_bounded() -> None:
    with pytest.raises(ValidationError):
        MixturePhase(from_step=1, weights={})
