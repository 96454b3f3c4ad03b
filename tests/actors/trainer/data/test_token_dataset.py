"""The sequences that make a step, and their tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.actors.trainer.data.order.shuffle import BatchSampler, feistel_permutation, rank_slice
from raytide.actors.trainer.data.token_dataset import TokenData
from raytide.core.errors import DataError

sizes = st.integers(1, 300)


@given(size=sizes, key=st.text(max_size=8))
def test_an_epoch_is_a_permutation(size: int, key: str) -> None:
    assert sorted(feistel_permutation(np.arange(size), size, key)) == list(range(size))


@given(seed=st.integers(0, 2**63 - 1), n=sizes, batch=st.integers(1, 64), steps=st.integers(1, 12))
def test_every_epoch_uses_each_sequence_once_whatever_the_batch(seed: int, n: int, batch: int, steps: int) -> None:
    sampler = BatchSampler(seed, n, batch)
    stream = np.concatenate([sampler.ids(step) for step in range(steps)])
    for start in range(0, len(stream), n):
        epoch = stream[start : start + n]
        assert len(set(epoch.tolist())) == len(epoch)
        assert epoch.min() >= 0
        assert epoch.max() < n


@given(seed=st.integers(0, 99), n=sizes, batch=st.integers(1, 64), step=st.integers(0, 99999), world=st.integers(1, 8))
def test_the_ranks_slices_make_up_the_step_for_any_world(seed: int, n: int, batch: int, step: int, world: int) -> None:
    ids = BatchSampler(seed, n, batch).ids(step)
    parts = [ids[rank_slice(batch, rank, world)] for rank in range(world)]
    assert np.array_equal(np.concatenate(parts), ids)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_order_differs_by_seed_and_by_epoch() -> None:
    first, second, other = (
        BatchSampler(1, 1000, 1000).ids(0),
        BatchSampler(1, 1000, 1000).ids(1),
        BatchSampler(2, 1000, 1000).ids(0),
    )
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, np.arange(1000))


def test_the_order_never_changes_between_releases() -> None:
    """A resume by a later release must see the same stream: these are what the first release gave."""
    assert BatchSampler(0, 10, 4).ids(0).tolist() == [2, 1, 7, 9]
    assert BatchSampler(0, 10, 4).ids(2).tolist() == [8, 6, 3, 6]


def test_a_sequence_reads_across_shards(dataset: Path) -> None:
    stream = np.concatenate([np.fromfile(file, "<u2") for file in sorted((dataset / "shards").glob("*.bin"))])
    data = TokenData(str(dataset), 32)
    assert data.n_sequences == (6000 - 1) // 32
    batch = data.batch(np.arange(data.n_sequences))
    assert all(np.array_equal(row, stream[i * 32 : i * 32 + 33]) for i, row in enumerate(batch))


def test_a_folder_without_a_manifest_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json.*raytide data build"):
        TokenData(str(tmp_path), 32)


def test_a_dataset_shorter_than_a_sequence_is_refused(dataset: Path) -> None:
    with pytest.raises(DataError, match="too few for one sequence"):
        TokenData(str(dataset), 6000)


def test_a_cut_off_shard_is_named(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    body = json.loads((dataset / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    (tmp_path / "shards/00000.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"00000\.bin has 2 bytes"):
        TokenData(str(tmp_path), 32)


def test_a_remote_dataset_is_staged_once(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    url = f"file://{dataset}"
    first, second = TokenData(url, 32), TokenData(url, 32)
    assert first.path == second.path
    assert tmp_path in first.path.parents
    assert np.array_equal(first.batch(np.arange(3)), TokenData(str(dataset), 32).batch(np.arange(3)))
