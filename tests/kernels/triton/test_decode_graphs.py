"""Decode steps through graphs give what they give without, and touch no block but their own and the dummy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.paged import paged_batch

from raytide.kernels import ref
from raytide.kernels.core import AttentionSpec, PagedBatch
from raytide.kernels.triton.decode_graphs import DecodeGraphs, bucket_of
from raytide.kernels.triton.geometry import DecodeBatch
from raytide.kernels.triton.graph_capture import FakeGraphCapture

BLOCK_SIZE, WIDTH, BLOCKS, DIM = 4, 6, 40, 8
DUMMY = BLOCKS - 1


class TinyModel:
    """Writes a token's keys and values into the cache and attends to its context."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(50, 1, DIM, generator=generator)
        self.cache = torch.randn(2, BLOCKS * BLOCK_SIZE, 1, DIM, generator=generator)
        self.runs = 0

    def __call__(self, ids_T: torch.Tensor, positions_T: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        self.runs += 1
        x_THD = self.embedding[ids_T] * (1 + positions_T[:, None, None])
        self.cache[:, batch.slots_T] = x_THD
        contexts = batch.lens_B3[:, 2].tolist() if isinstance(batch, DecodeBatch) else batch.context_lens
        now = PagedBatch(batch.query_lens, contexts, batch.block_tables_BM, batch.slots_T, batch.block_size)
        return ref.attention(now, AttentionSpec(0.3))(x_THD, self.cache).flatten(1)


def graphs(model: TinyModel, capture: FakeGraphCapture, most_rows: int = 20) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        capture,
        most_rows=most_rows,
        table_width=WIDTH,
        block_size=BLOCK_SIZE,
        dummy_block=DUMMY,
        device=torch.device("cpu"),
    )


def step(contexts: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    ids = torch.randint(0, 50, (len(contexts),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.tensor(contexts) - 1, paged_batch([1] * len(contexts), contexts, BLOCK_SIZE, seed)


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=19), min_size=1, max_size=4), st.integers(0, 9))
def test_steps_through_graphs_are_those_without(steps: list[list[int]], seed: int) -> None:
    plain, model = TinyModel(), TinyModel()
    through = graphs(model, FakeGraphCapture())
    for contexts in steps:
        expected = plain(*step(contexts, seed))
        found = through.run(*step(contexts, seed))
        assert found is not None
        torch.testing.assert_close(found, expected)
        dummy = slice(DUMMY * BLOCK_SIZE, BLOCKS * BLOCK_SIZE)
        model.cache[:, dummy] = plain.cache[:, dummy]
        assert torch.equal(model.cache, plain.cache)


def test_buckets_hold_their_rows_and_pad_little() -> None:
    assert [bucket_of(rows, 1000) for rows in (1, 2, 3, 5, 8, 9, 17, 64, 65, 129, 200)] == [
        *(1, 2, 4, 8, 8, 16, 24, 64, 72, 144, 208)
    ]
    assert all(rows <= bucket_of(rows, 512) <= max(8, rows + 8, rows * 9 // 8) for rows in range(1, 513))
    assert bucket_of(9, 10) == 10


def test_each_bucket_is_captured_when_first_needed_and_all_share_one_pool() -> None:
    capture, model = FakeGraphCapture(), TinyModel()
    through = graphs(model, capture)
    assert capture.captured_from == []
    for rows in (3, 4, 3, 9, 1):
        through.run(*step([2] * rows, 0))
    assert capture.captured_from == [(0, 1)] * 3 and capture.pools == 1


def test_after_clear_graphs_are_captured_anew() -> None:
    capture = FakeGraphCapture()
    through = graphs(TinyModel(), capture)
    through.run(*step([2], 0))
    through.clear()
    through.run(*step([2], 0))
    assert len(capture.captured_from) == 2


def test_steps_that_graphs_cannot_run_are_left_to_the_caller() -> None:
    model = TinyModel()
    through = graphs(model, FakeGraphCapture(), most_rows=2)
    assert through.run(*step([2] * 3, 0)) is None
    chunk = paged_batch([2], [3], BLOCK_SIZE)
    assert through.run(torch.zeros(2, dtype=torch.int64), torch.tensor([1, 2]), chunk) is None
    assert model.runs == 0


def test_a_step_that_cannot_be_captured_runs_without_graphs_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Refuses(FakeGraphCapture):
        def capture(self, step: object, pool: object) -> None:  # type: ignore[override]
            raise RuntimeError("operation not permitted when stream is capturing")

    through = graphs(TinyModel(), Refuses())
    assert through.run(*step([2], 0)) is None and through.run(*step([2], 0)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
