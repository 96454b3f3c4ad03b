"""Best-fit packing against a plain loop, and what it promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.data.order.shuffle import balanced_rows, rank_slice
from raytide.actors.trainer.data.packing import PackingPlan, best_fit

lengths_of = st.lists(st.integers(1, 90), max_size=60)


def plan_of(lengths: list[int], seq_len: int) -> PackingPlan:
    counts = np.asarray(lengths, np.int64)
    return best_fit(np.cumsum(counts) - counts, counts, seq_len)


def by_definition(lengths: list[int], seq_len: int) -> list[list[tuple[int, int]]]:
    """Full rows, then each piece, longest first, in the fullest row with room; of equals the one that was so first."""
    rows, pieces, start = [], [], 0
    for length in lengths:
        rows += [[(start + cut * seq_len, seq_len)] for cut in range(length // seq_len)]
        if length % seq_len:
            pieces.append((start + length // seq_len * seq_len, length % seq_len))
        start += length
    packed: list[list[tuple[int, int]]] = []
    room, since = [], []
    for time, piece in enumerate(sorted(pieces, key=lambda piece: -piece[1])):
        fits = [(room[row], since[row], row) for row in range(len(packed)) if room[row] >= piece[1]]
        if not fits:
            packed.append([])
            room.append(seq_len)
            since.append(time)
        row = min(fits)[2] if fits else len(packed) - 1
        packed[row].append(piece)
        room[row] -= piece[1]
        since[row] = time
    return rows + packed


@given(lengths=lengths_of, seq_len=st.integers(1, 40))
def test_rows_are_those_of_the_plain_loop(lengths: list[int], seq_len: int) -> None:
    plan = plan_of(lengths, seq_len)
    rows = [list(zip(*(each.tolist() for each in plan.pieces(row)), strict=True)) for row in range(plan.rows)]
    assert rows == by_definition(lengths, seq_len)


@given(lengths=lengths_of, seq_len=st.integers(1, 40))
def test_every_token_is_in_one_row_and_no_document_that_fits_is_cut(lengths: list[int], seq_len: int) -> None:
    plan = plan_of(lengths, seq_len)
    tokens = [t for s, n in zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True) for t in range(s, s + n)]
    assert sorted(tokens) == list(range(sum(lengths)))
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    pieces = set(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    assert all((s, n) in pieces for s, n in zip(starts, lengths, strict=True) if n <= seq_len)
    assert all(plan.pieces(row)[1].sum() <= seq_len for row in range(plan.rows))


@given(lengths=lengths_of, seq_len=st.integers(1, 40))
def test_attention_pairs_are_squared_lengths(lengths: list[int], seq_len: int) -> None:
    plan = plan_of(lengths, seq_len)
    wanted = [int((plan.pieces(row)[1] ** 2).sum()) for row in range(plan.rows)]
    assert plan.attention_pairs(np.arange(plan.rows)).tolist() == wanted


def test_attention_pairs_of_some_rows_square_the_pieces_of_these_rows_alone() -> None:
    squared: list[int] = []

    class Lengths(np.ndarray[Any, np.dtype[np.int64]]):
        """Lengths that note how many of them are squared."""

        def __pow__(self, exponent: Any, modulo: None = None) -> Any:
            squared.append(self.size)
            return np.asarray(self) ** exponent

    plan = plan_of([5, 3, 8, 2, 6, 8, 8], 8)
    noted = replace(plan, lengths=plan.lengths.view(Lengths))
    rows = np.array([4, 0])
    assert noted.attention_pairs(rows).tolist() == plan.attention_pairs(np.arange(plan.rows))[rows].tolist()
    assert squared == [len(plan.pieces(row)[0]) for row in rows]


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_documents_like_code_files_pad_a_thousandth_at_most(seq_len: int) -> None:
    random = np.random.default_rng(1)
    lengths = np.maximum(2, random.lognormal(7.2, 1.4, 50_000)).astype(np.int64)
    assert best_fit(np.cumsum(lengths) - lengths, lengths, seq_len).padding <= 0.001


def test_no_documents_are_no_rows() -> None:
    assert plan_of([], 8).rows == 0


@given(costs=st.lists(st.integers(0, 10**9), max_size=40), ranks=st.integers(1, 8))
def test_balanced_ranks_share_out_the_same_items_in_the_same_numbers(costs: list[int], ranks: int) -> None:
    parts = balanced_rows(np.asarray(costs, np.int64), ranks)
    assert sorted(place for part in parts for place in part.tolist()) == list(range(len(costs)))
    slices = [rank_slice(len(costs), rank, ranks) for rank in range(ranks)]
    assert [len(part) for part in parts] == [each.stop - each.start for each in slices]


def test_balanced_ranks_have_almost_equal_sums_where_slices_have_not() -> None:
    costs = np.sort(np.random.default_rng(0).integers(1, 1000, 64) ** 2)
    sums = [int(costs[part].sum()) for part in balanced_rows(costs, 4)]
    slices = [int(costs[rank_slice(64, rank, 4)].sum()) for rank in range(4)]
    assert max(sums) - min(sums) < 0.02 * (max(slices) - min(slices))
