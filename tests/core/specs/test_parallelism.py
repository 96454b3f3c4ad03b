"""The axes of a mesh: what a world makes of them, which layers a stage has, which microbatches a pipeline gets."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.errors import ConfigError
from raytide.core.specs.parallelism import LOOPED, SPLIT_BACKWARD, Parallelism, Schedule

SCHEDULES = st.sampled_from(get_args(Schedule))
SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES, SIZES, st.integers(1, 40))
def test_any_world_that_holds_the_fixed_axes_works(r: int, t: int, p: int, c: int, world: int) -> None:
    layout = Parallelism(replicate=r, tensor=t, pipeline=p, context=c)
    if world < r * t * p * c:
        with pytest.raises(ConfigError, match=r"needs .* ranks"):
            layout.sizes(world)
        return
    sizes = layout.sizes(world)
    assert (sizes.replicate, sizes.tensor, sizes.pipeline, sizes.context) == (r, t, p, c)
    assert world - r * t * p * c < sizes.world <= world


@given(SIZES, SCHEDULES, st.integers(2, 3), st.integers(0, 30))
def test_the_stages_of_all_ranks_have_every_layer_once(
    pipeline: int, schedule: Schedule, stages: int, more: int
) -> None:
    layout = Parallelism(pipeline=pipeline, schedule=schedule, stages=stages if schedule in LOOPED else None)
    layers = layout.total_stages + more
    of_ranks = [layout.stages_of(rank) for rank in range(pipeline)]
    assert sorted(itertools.chain(*of_ranks)) == list(range(layout.total_stages))
    shares = [layout.stage_layers(stage, layers) for stage in range(layout.total_stages)]
    assert list(itertools.chain(*shares)) == list(range(layers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(shares[0]) <= max(map(len, shares)) and len(shares[-1]) == min(map(len, shares))


@given(SIZES, SCHEDULES, st.integers(1, 40), st.integers(1, 9))
def test_microbatches_hold_every_row_and_fill_the_pipeline(
    pipeline: int, schedule: Schedule, rows: int, size: int
) -> None:
    layout = Parallelism(pipeline=pipeline, schedule=schedule)
    count, actual = layout.microbatches(rows, size)
    assert actual <= size
    assert count * actual >= rows
    if pipeline == 1:
        assert count == math.ceil(rows / size)
    else:
        assert count >= layout.min_microbatches
        assert count * actual < max(rows, layout.min_microbatches) + pipeline * actual


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_weights_stay_where_the_backward_is_split(schedule: Schedule) -> None:
    assert Parallelism(pipeline=2, schedule=schedule).frees_after_forward == (schedule not in SPLIT_BACKWARD)
    assert not Parallelism(pipeline=2, schedule=schedule, zero=1).frees_after_forward
