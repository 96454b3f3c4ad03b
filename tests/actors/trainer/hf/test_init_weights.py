"""The part of a parameter that each rank reads or draws."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.hf.init_weights import cut_block


@given(st.data())
def test_the_ranks_parts_are_the_whole_once_for_each_copy(data: st.DataObject) -> None:
    """Whatever divides which dimension, and also where two axes divide the same one."""
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dims = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    axes = data.draw(st.lists(st.tuples(st.integers(1, 4), dims), max_size=3))
    seen = np.zeros(shape, dtype=int)
    for at in itertools.product(*(range(ranks) for ranks, _ in axes)):
        seen[cut_block(shape, [(ranks, rank, dim) for (ranks, dim), rank in zip(axes, at, strict=True)])] += 1
    assert (seen == np.prod([ranks for ranks, dim in axes if dim is None], dtype=int)).all()
