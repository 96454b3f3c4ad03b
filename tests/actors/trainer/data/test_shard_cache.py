"""Remote shards: read as from a copy, fetched once, checked, and evicted by bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from tests.actors.trainer.token_files import random_documents, write_documents

from raytide.actors.trainer.data import shard_cache
from raytide.actors.trainer.data.order.shuffle import Shuffle
from raytide.actors.trainer.data.packed_dataset import PackedData
from raytide.actors.trainer.data.token_dataset import TokenData
from raytide.actors.trainer.runners.local import train_local
from raytide.core.errors import ConfigError, DataError
from raytide.core.io.private_folder import private_folder
from raytide.core.specs.mixture import StreamSpec
from raytide.core.specs.train import TrainSpec

SHARDS = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return write_documents(tmp_path / "d", random_documents(200, longest=40), shards=SHARDS)


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """The dataset in an object store of this process."""
    fs = fsspec.filesystem("memory")
    fs.put(str(folder), "/streamed", recursive=True)
    yield "memory://streamed"
    fs.rm("/streamed", recursive=True)


def cached() -> list[Path]:
    return sorted(private_folder("shards").glob("*.bin"))


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "shards").iterdir())


def test_a_stream_reads_what_a_copy_does_and_fetches_only_what_it_needs(folder: Path, url: str) -> None:
    streamed, local = TokenData(url, 16, StreamSpec()), TokenData(str(folder), 16)
    assert cached() == []
    streamed.rows(np.arange(2))
    assert len(cached()) == 1
    ids = np.random.default_rng(0).permutation(local.n_sequences)
    assert all(np.array_equal(a, b) for a, b in zip(streamed.rows(ids), local.rows(ids), strict=True))
    assert len(cached()) == SHARDS


def test_packed_rows_are_those_of_a_copy(folder: Path, url: str) -> None:
    streamed, local = PackedData(TokenData(url, 16, StreamSpec())), PackedData(TokenData(str(folder), 16))
    ids = np.arange(local.n_sequences)
    streamed.prefetch(ids[:5])
    assert streamed.digest == local.digest
    assert all(np.array_equal(a, b) for a, b in zip(streamed.rows(ids), local.rows(ids), strict=True))


def test_the_cache_keeps_to_its_bytes_and_the_last_used_stay(folder: Path, url: str) -> None:
    budget = bytes_of(folder) // 2
    streamed = TokenData(url, 16, StreamSpec(cache_gb=budget / 1e9))
    first = np.arange(1)
    for index in range(streamed.n_sequences):
        streamed.rows(np.asarray([index]))
        streamed.rows(first)  # the first shard is used all the time
        assert sum(file.stat().st_size for file in cached()) <= budget
        assert any(file.name.endswith("-000000.bin") for file in cached())


def test_prefetched_shards_are_there_before_they_are_read(url: str) -> None:
    streamed = TokenData(url, 16, StreamSpec())
    streamed.prefetch(np.arange(streamed.n_sequences))
    streamed.rows(np.arange(streamed.n_sequences))
    assert len(cached()) == SHARDS


def test_an_altered_shard_is_named_and_not_kept(url: str) -> None:
    streamed = TokenData(url, 16, StreamSpec())
    fs = fsspec.filesystem("memory")
    body = fs.cat("/streamed/shards/00003.bin")
    fs.pipe("/streamed/shards/00003.bin", bytes([body[0] ^ 1]) + body[1:])
    streamed.prefetch(np.arange(streamed.n_sequences))
    with pytest.raises(DataError, match=r"shards/00003\.bin of memory://streamed was altered.*SHA-256"):
        streamed.rows(np.arange(streamed.n_sequences))
    assert not any(file.name.endswith("-000003.bin") for file in cached())


def test_a_missing_shard_is_named(url: str) -> None:
    streamed = TokenData(url, 16, StreamSpec())
    fsspec.filesystem("memory").rm("/streamed/shards/00000.bin")
    with pytest.raises(DataError, match=r"shards/00000\.bin of memory://streamed is missing"):
        streamed.rows(np.arange(1))
    fsspec.filesystem("memory").touch("/streamed/shards/00000.bin")


def test_a_cache_smaller_than_a_shard_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is less than a shard"):
        TokenData(url, 16, StreamSpec(cache_gb=1e-9))


def test_a_shard_that_others_evict_at_once_ends_with_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = TokenData(url, 16, StreamSpec())
    fetch = shard_cache.ShardCache._fetch

    def evicted(cache: shard_cache.ShardCache, index: int) -> None:
        fetch(cache, index)
        for file in cached():
            file.unlink()

    monkeypatch.setattr(shard_cache.ShardCache, "_fetch", evicted)
    with pytest.raises(DataError, match="is evicted from"):
        streamed.rows(np.arange(1))


def test_a_run_that_streams_in_blocks_loses_as_one_on_a_copy_does(folder: Path, url: str, tmp_path: Path) -> None:
    losses: dict[str, list[float]] = {}
    for name, dataset, gigabytes in (("copy", str(folder), 1.0), ("stream", url, bytes_of(folder) / 1.9e9)):
        spec = TrainSpec.model_validate(
            {
                "dataset": dataset,
                "out": str(tmp_path / name),
                "model": {"dim": 32, "layers": 1, "heads": 2, "max_seq_len": 16},
                "steps": 8,
                "global_batch": 6,
                "seq_len": 16,
                "packing": "best_fit",
                "stream": {"cache_gb": gigabytes, "ahead": 2, "block": 10, "window": 3},
                "export": False,
            }
        )
        train_local(spec, on_step=lambda result, name=name: losses.setdefault(name, []).append(result.loss))
    assert losses["stream"] == losses["copy"]


@pytest.mark.parametrize(("size", "block", "window"), [(100, 7, 3), (100, 10, 4), (37, 36, 1), (1000, 1, 5)])
def test_blocks_are_a_permutation_that_stays_within_its_window(size: int, block: int, window: int) -> None:
    order = Shuffle(block, window).permute(np.arange(size), size, "k")
    assert sorted(order.tolist()) == list(range(size))
    reach, whole = block * window, size // block * block
    for begin in range(0, whole if size // block > 1 else 0, reach):
        assert len(set((order[begin : min(begin + reach, whole)] // block).tolist())) <= window
