import hashlib
import pickle
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import NoCredentialsError
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.io.storage import open_url
from raytide.core.io.token_dataset import ITEM_BYTES, Shard, ShardFormat, TokenDtype
from raytide.pipelines.chunk_store import CHECKSUM_BYTES, AlteredError, ChunkStore, Delivery, pack_blob, unpack_blob
from raytide.pipelines.writers.shards import ChunkTokens, ShardStage, clear, plan_shards

documents_of_ids = st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=9), min_size=1, max_size=12)


def write(
    out: str,
    documents: Sequence[list[int]],
    pieces: int,
    shard_tokens: int,
    form: ShardFormat = "bin",
    dtype: TokenDtype = "uint16",
    keep: Sequence[bool] = (),
) -> tuple[Shard, ...]:
    """Stores the documents in chunks of `pieces`, and writes those to keep, the last shard first."""
    store, chunks = ChunkStore.create(out, "token"), []
    for start in range(0, len(documents), pieces):
        some = documents[start : start + pieces]
        name = f"tokens-{start}"
        store.put({name: pack_blob({"tokens": np.array(list(chain(*some)), dtype)}, {})})
        lengths = np.array([len(ids) for ids in some], np.int64)
        mask = np.array(keep[start : start + pieces] if keep else [True] * len(some), np.bool_)
        chunks.append(ChunkTokens(name, lengths, mask))
    stage = ShardStage(store, out, form)
    plans = list(plan_shards(chunks, shard_tokens, form))
    shards = [stage(plan) for plan in reversed(plans)]
    return tuple(shard for shard in reversed(shards) if shard is not None)


def read_bin(out: Path, shards: tuple[Shard, ...], dtype: TokenDtype = "uint16") -> list[int]:
    return [int(i) for s in shards for i in np.frombuffer((out / s.file).read_bytes(), f"<u{ITEM_BYTES[dtype]}")]


@given(documents_of_ids, st.integers(1, 5), st.integers(1, 20))
def test_bin_shards_hold_the_tokens_in_order_and_are_full_but_for_the_last(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], pieces: int, shard_tokens: int
) -> None:
    out = tmp_path_factory.mktemp("bin")
    shards = write(str(out), documents, pieces, shard_tokens)
    assert read_bin(out, shards) == list(chain(*documents))
    assert all(shard.tokens == shard_tokens for shard in shards[:-1])
    assert 1 <= shards[-1].tokens <= shard_tokens


@given(documents_of_ids, st.integers(1, 5), st.integers(1, 20), st.sampled_from(["bin", "parquet"]))
def test_the_chunks_that_tokens_come_in_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    pieces: int,
    shard_tokens: int,
    form: ShardFormat,
) -> None:
    out = str(tmp_path_factory.mktemp("pack"))
    assert write(out, documents, pieces, shard_tokens, form) == write(out, documents, 1, shard_tokens, form)


@given(st.data(), documents_of_ids, st.integers(1, 5), st.integers(1, 20), st.sampled_from(["bin", "parquet"]))
def test_documents_that_are_not_kept_leave_no_trace(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    documents: list[list[int]],
    pieces: int,
    shard_tokens: int,
    form: ShardFormat,
) -> None:
    out = str(tmp_path_factory.mktemp("mask"))
    keep = data.draw(st.lists(st.booleans(), min_size=len(documents), max_size=len(documents)))
    kept = [document for document, is_kept in zip(documents, keep, strict=True) if is_kept]
    masked = write(out, documents, pieces, shard_tokens, form, keep=keep)
    assert masked == (write(out, kept, pieces, shard_tokens, form) if kept else ())


@given(documents_of_ids, st.integers(1, 5), st.integers(1, 20), st.sampled_from(["bin", "parquet"]))
def test_the_index_beside_each_shard_holds_the_ends_of_the_documents_that_end_in_it(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    pieces: int,
    shard_tokens: int,
    form: ShardFormat,
) -> None:
    out = tmp_path_factory.mktemp("index")
    shards = write(str(out), documents, pieces, shard_tokens, form)
    ends, start = list(accumulate(map(len, documents))), 0
    for shard in shards:
        assert shard.index is not None
        found = np.fromfile(out / shard.index.file, "<u8").tolist()
        assert found == [end for end in ends if start < end <= start + shard.tokens]
        assert shard.index.documents == len(found)
        start += shard.tokens


@given(documents_of_ids, st.integers(1, 20))
def test_parquet_shards_hold_a_row_for_each_document(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int
) -> None:
    out = tmp_path_factory.mktemp("parquet")
    shards = write(str(out), documents, 3, shard_tokens, "parquet")
    tables = [pq.read_table(out / shard.file) for shard in shards]
    assert [row for table in tables for row in table.column("tokens").to_pylist()] == documents
    assert [shard.tokens for shard in shards] == [sum(map(len, table.column("tokens").to_pylist())) for table in tables]
    assert all(shard.tokens >= shard_tokens for shard in shards[:-1])


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    shards = write(str(tmp_path), [[70_000, 1]], 1, 10, dtype="uint32")
    assert read_bin(tmp_path, shards, "uint32") == [70_000, 1]


def test_a_blob_of_an_earlier_release_is_read() -> None:
    """The signatures of its datasets begin with a SHA-256."""
    body = pack_blob({"slots": np.arange(5)}, {"form": 1})[CHECKSUM_BYTES:]
    arrays, about = unpack_blob(hashlib.sha256(body).digest()[:CHECKSUM_BYTES] + body, "signatures.bin")
    assert (arrays["slots"].tolist(), about) == ([0, 1, 2, 3, 4], {"form": 1})


def test_a_chunk_that_was_altered_is_found(tmp_path: Path) -> None:
    write(str(tmp_path), [[1, 2]], 1, 10)
    chunk = tmp_path / ".partial" / "tokens-0"
    whole = chunk.read_bytes()
    store = ChunkStore.create(str(tmp_path), "token")
    plans = list(plan_shards([ChunkTokens("tokens-0", np.array([2]), np.array([True]))], 10, "bin"))
    for torn in (b"", whole[:10], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        chunk.write_bytes(torn)
        with pytest.raises(AlteredError, match="tokens-0 was altered") as caught:
            ShardStage(store, str(tmp_path), "bin")(plans[0])
        assert pickle.loads(pickle.dumps(caught.value)).name == "tokens-0", "it may come from a worker"


def test_a_worker_that_sees_another_folder_of_the_same_name_writes_nothing(tmp_path: Path) -> None:
    write(str(tmp_path), [[1, 2]], 1, 10)
    plans = list(plan_shards([ChunkTokens("tokens-0", np.array([2]), np.array([True]))], 10, "bin"))
    assert ShardStage(ChunkStore(str(tmp_path / ".partial"), "of another build"), "nowhere", "bin")(plans[0]) is None


def test_clear_removes_a_dataset_and_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    write(str(tmp_path), [[1, 2]], 1, 10)
    (tmp_path / "shards" / f"00001.bin.{'0' * 32}.part").write_text("unfinished")
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / f"manifest.json.{'0' * 32}.part").write_text("unfinished")
    (tmp_path / "README").write_text("mine")
    clear(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial", "README"]


def test_clear_leaves_a_foreign_file_among_the_shards(tmp_path: Path) -> None:
    write(str(tmp_path), [[1, 2]], 1, 10)
    (tmp_path / "shards" / "notes.bin").write_text("mine")
    clear(str(tmp_path))
    assert [path.name for path in (tmp_path / "shards").rglob("*") if path.is_file()] == ["notes.bin"]


def test_a_worker_without_credentials_does_not_see_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ChunkStore.create(f"memory://{tmp_path.name}", "token")
    monkeypatch.setattr(type(open_url(store.folder)[0]), "cat_file", Mock(side_effect=NoCredentialsError()))
    assert store.hand_over({"lengths-1": b"x"}, frozenset()) == Delivery({"lengths-1": b"x"}, is_stored=False)
