from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.io.token_dataset import ITEM_BYTES, Shard, ShardFormat, TokenDtype
from raytide.pipelines.pack import PACKERS, clear

documents_of_ids = st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=9), min_size=1, max_size=12)


def pack(
    out: str,
    documents: Sequence[list[int]],
    pieces: int,
    shard_tokens: int,
    form: ShardFormat = "bin",
    dtype: TokenDtype = "uint16",
) -> tuple[Shard, ...]:
    packer = PACKERS[form](out, shard_tokens, dtype)
    for start in range(0, len(documents), pieces):
        some = documents[start : start + pieces]
        packer.add(np.array(list(chain(*some)), dtype), np.array([len(ids) for ids in some], np.int64))
    return packer.finish()


def read_bin(out: Path, shards: tuple[Shard, ...], dtype: TokenDtype = "uint16") -> list[int]:
    return [int(i) for s in shards for i in np.frombuffer((out / s.file).read_bytes(), f"<u{ITEM_BYTES[dtype]}")]


@given(documents_of_ids, st.integers(1, 5), st.integers(1, 20))
def test_bin_shards_hold_the_tokens_in_order_and_are_full_but_for_the_last(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], pieces: int, shard_tokens: int
) -> None:
    out = tmp_path_factory.mktemp("bin")
    shards = pack(str(out), documents, pieces, shard_tokens)
    assert read_bin(out, shards) == list(chain(*documents))
    assert all(shard.tokens == shard_tokens for shard in shards[:-1])
    assert 1 <= shards[-1].tokens <= shard_tokens


@given(documents_of_ids, st.integers(1, 5), st.integers(1, 20), st.sampled_from(["bin", "parquet"]))
def test_the_pieces_that_tokens_come_in_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    pieces: int,
    shard_tokens: int,
    form: ShardFormat,
) -> None:
    out = str(tmp_path_factory.mktemp("pack"))
    assert pack(out, documents, pieces, shard_tokens, form) == pack(out, documents, 1, shard_tokens, form)


@given(documents_of_ids, st.integers(1, 20))
def test_parquet_shards_hold_a_row_for_each_document(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int
) -> None:
    out = tmp_path_factory.mktemp("parquet")
    shards = pack(str(out), documents, 3, shard_tokens, "parquet")
    tables = [pq.read_table(out / shard.file) for shard in shards]
    assert [row for table in tables for row in table.column("tokens").to_pylist()] == documents
    assert [shard.tokens for shard in shards] == [sum(map(len, table.column("tokens").to_pylist())) for table in tables]
    assert all(shard.tokens >= shard_tokens for shard in shards[:-1])


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    shards = pack(str(tmp_path), [[70_000, 1]], 1, 10, dtype="uint32")
    assert read_bin(tmp_path, shards, "uint32") == [70_000, 1]


def test_clear_removes_a_dataset_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    pack(str(tmp_path), [[1, 2]], 1, 10)
    (tmp_path / "shards" / f"00001.bin.{'0' * 32}.part").write_text("unfinished")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "README").write_text("mine")
    clear(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["README"]


def test_clear_leaves_a_foreign_file_among_the_shards(tmp_path: Path) -> None:
    pack(str(tmp_path), [[1, 2]], 1, 10)
    (tmp_path / "shards" / "notes.bin").write_text("mine")
    clear(str(tmp_path))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.bin"]
