"""A build in this process, on the inline runner: what is built, and what is left when it fails."""

import errno
import json
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileOpener
from tests.disk_fixture import Disk
from transformers import AutoTokenizer

from raytide.core.errors import ClusterError, ConflictError, DataError, StorageError
from raytide.core.io.storage import write_bytes
from raytide.core.io.token_dataset import TokenManifest, document_ends, load_manifest, verify
from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec
from raytide.pipelines import build as build_module
from raytide.pipelines import inputs, survey
from raytide.pipelines.build import Progress
from raytide.pipelines.chunk_store import AlteredError
from raytide.pipelines.runners.inline import InlineRunner

SpecOf = Callable[..., DataSpec]


def build(spec: DataSpec, **kwargs: Any) -> TokenManifest:
    return build_module.build(spec, runner=InlineRunner(), **kwargs)


def texts_in(manifest: TokenManifest, out: str) -> list[str]:
    """The documents of a bin dataset, by transformers' tokenizer."""
    ids = np.concatenate([np.fromfile(Path(out) / s.file, manifest.dtype) for s in manifest.shards])
    tokenizer = AutoTokenizer.from_pretrained(out)
    ends = np.flatnonzero(ids == manifest.eos_id)
    return [tokenizer.decode(part) for part in (p[p != manifest.eos_id] for p in np.split(ids, ends + 1)) if len(part)]


def files_in(out: str) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(Path(out).rglob("*")) if p.is_file()}


def test_a_dataset_holds_every_kept_document_once_in_path_order(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus)
    manifest = build(spec)
    assert manifest.source.read == 45
    assert manifest.source.dropped == {"too_short": 1, "not_utf8": 1, "too_long": 1, "long_line": 1, "duplicate": 1}
    kept = sorted(p for p in corpus.rglob("[0-9][0-9].txt"))
    assert texts_in(manifest, spec.out) == [path.read_text() for path in kept]
    assert manifest.documents == len(kept) == 40
    assert manifest == verify(spec.out)
    assert len(manifest.shards) > 1
    assert sorted(files_in(spec.out)) == sorted(
        ["manifest.json", "tokenizer.json", "tokenizer_config.json", *(file.file for file in manifest.files)]
    )
    ids = np.concatenate([np.fromfile(Path(spec.out) / s.file, manifest.dtype) for s in manifest.shards])
    assert document_ends(spec.out, manifest).tolist() == (1 + np.flatnonzero(ids == manifest.eos_id)).tolist()


def test_of_duplicates_the_first_in_path_order_stays(corpus: Path, spec_of: SpecOf) -> None:
    copies = [corpus / "01.txt", corpus / "99-copy.txt"]
    assert build(spec_of(*copies)).source.dropped == {"duplicate": 1}
    again = spec_of(*copies, out=str(corpus.parent / "all"), filter=TextFilter(dedup=False))
    assert build(again).documents == 2


def test_parquet_rows_are_documents(tmp_path: Path, spec_of: SpecOf) -> None:
    rows = ["first row", None, "second row", "third row", "first row"]
    pq.write_table(pa.table({"body": rows}), tmp_path / "in.parquet", row_group_size=2)
    spec = spec_of(tmp_path / "in.parquet", text_column="body")
    manifest = build(spec)
    assert texts_in(manifest, spec.out) == ["first row", "second row", "third row"]
    assert manifest.source.dropped == {"no_text": 1, "duplicate": 1}


def test_parquet_shards_hold_the_same_tokens_as_bin_shards(corpus: Path, spec_of: SpecOf) -> None:
    out = str(corpus.parent / "rows")
    flat, rows = build(spec_of(corpus)), build(spec_of(corpus, format="parquet", out=out))
    documents = [ids for s in rows.shards for ids in pq.read_table(f"{out}/{s.file}").column("tokens").to_pylist()]
    assert list(chain(*documents)) == [
        int(i) for s in flat.shards for i in np.fromfile(Path(spec_of(corpus).out) / s.file, flat.dtype)
    ]
    assert len(documents) == rows.documents == flat.documents
    assert verify(out) == rows


def test_a_dataset_can_go_to_an_object_store_and_back(corpus: Path, spec_of: SpecOf) -> None:
    for path in corpus.glob("0*.txt"):
        write_bytes(f"memory://store/in/{path.name}", path.read_bytes())
    spec = spec_of("memory://store/in", out="memory://store/out")
    first = build(spec)
    assert verify(spec.out) == first
    write_bytes(f"{spec.out}/{first.shards[0].file}", b"altered")
    assert build(spec) == first == verify(spec.out)


def test_chunks_and_pieces_leave_no_trace(corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    build(spec_of(corpus))
    monkeypatch.setattr(inputs, "MAX_CHUNK_PARTS", 3)
    monkeypatch.setattr("raytide.pipelines.encode.BATCH_CHARS", 50)
    build(spec_of(corpus, out=str(corpus.parent / "other")))
    assert files_in(str(corpus.parent / "other")) == files_in(spec_of(corpus).out)


def test_the_seed_chooses_what_the_tokenizer_learns_from(corpus: Path, spec_of: SpecOf) -> None:
    first = build(spec_of(corpus))
    other = build(spec_of(corpus, seed=1, out=str(corpus.parent / "other")))
    assert first.tokenizer_sha256 != other.tokenizer_sha256


def test_a_given_tokenizer_is_used_as_it_is(corpus: Path, spec_of: SpecOf) -> None:
    first = build(spec_of(corpus))
    given = TokenizerSpec(file=f"{spec_of(corpus).out}/tokenizer.json")
    second = build(spec_of(corpus, tokenizer=given, out=str(corpus.parent / "other"), seed=5))
    assert second.shards == first.shards
    assert second.tokenizer_sha256 == first.tokenizer_sha256


def test_a_missing_tokenizer_file_is_named_before_any_work(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus, tokenizer=TokenizerSpec(file=str(corpus / "none.json")))
    with pytest.raises(DataError, match=r"none\.json does not exist"):
        build(spec)
    assert not Path(spec.out).exists()


def test_an_empty_corpus_says_why_each_document_was_dropped_and_leaves_nothing(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus / "empty.txt", corpus / "latin1.txt", name="mine")
    with pytest.raises(
        DataError, match="dataset mine: the corpus is empty: none of 2 documents in 2 files was kept"
    ) as e:
        build(spec)
    assert "1 too_short" in e.value.message
    assert "1 not_utf8" in e.value.message
    assert e.value.hint
    assert not Path(spec.out).exists()


def test_an_input_directory_without_files_is_an_empty_corpus(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match=r"no input files in .*void"):
        build(spec_of(tmp_path / "void"))


@pytest.mark.parametrize("row_groups", [0, 1])
def test_a_parquet_file_without_rows_is_an_empty_corpus(tmp_path: Path, spec_of: SpecOf, row_groups: int) -> None:
    table = pa.table({"text": pa.array([], pa.string())})
    with pq.ParquetWriter(tmp_path / "in.parquet", table.schema) as writer:
        for _ in range(row_groups):
            writer.write_table(table)
    with pytest.raises(DataError, match="none of 0 documents in 1 files was kept"):
        build(spec_of(tmp_path / "in.parquet"))


def test_a_finished_dataset_is_not_built_again(corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(corpus)
    first = build(spec)
    monkeypatch.setattr(build_module, "plan_chunks", None)  # would fail if it were called
    assert build(spec.model_copy(update={"workers": 7, "name": "again"})) == first


def test_a_damaged_dataset_is_built_again_to_the_same_bytes(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus)
    first = build(spec)
    whole = files_in(spec.out)
    shard = Path(spec.out) / first.shards[1].file
    shard.write_bytes(b"\xff" + shard.read_bytes()[1:])
    with pytest.raises(DataError):
        verify(spec.out)
    assert build(spec) == first
    assert files_in(spec.out) == whole


def test_another_spec_or_a_changed_input_never_replaces_a_dataset(corpus: Path, spec_of: SpecOf) -> None:
    build(spec_of(corpus))
    before = files_in(spec_of(corpus).out)
    with pytest.raises(ConflictError, match="a dataset of another spec or of other inputs"):
        build(spec_of(corpus, seed=1))
    (corpus / "01.txt").write_text("something new")
    with pytest.raises(ConflictError):
        build(spec_of(corpus))
    assert files_in(spec_of(corpus).out) == before


def test_a_manifest_that_cannot_be_read_is_not_overwritten(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus)
    Path(spec.out).mkdir()
    (Path(spec.out) / "manifest.json").write_text(json.dumps({"version": 99}))
    with pytest.raises(ConflictError, match="version 99"):
        build(spec)


def test_what_a_killed_build_left_is_no_dataset_and_is_built_over(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus)
    build(spec)
    whole = files_in(spec.out)
    (Path(spec.out) / "manifest.json").unlink()
    (Path(spec.out) / "shards" / "00000.bin").write_bytes(b"half")
    (Path(spec.out) / "shards" / "00077.bin").write_bytes(b"of another life")
    with pytest.raises(DataError, match="not a token dataset"):
        load_manifest(spec.out)
    build(spec)
    assert files_in(spec.out) == whole


def test_a_full_disk_is_a_storage_error_that_leaves_nothing_to_be_read(
    corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, real = spec_of(corpus), LocalFileOpener.write

    def fill_up(file: LocalFileOpener, data: bytes) -> int:
        if "00001.bin" in file.path:
            real(file, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device", file.path)
        return int(real(file, data))

    monkeypatch.setattr(LocalFileOpener, "write", fill_up)
    with pytest.raises(StorageError, match=r"no space left while writing .*00001\.bin"):
        build(spec)
    assert files_in(spec.out) == {}
    monkeypatch.setattr(LocalFileOpener, "write", real)
    assert build(spec) == verify(spec.out)


def test_a_build_on_a_disk_that_is_full_says_what_it_needs_and_goes_on_when_there_is_room(
    corpus: Path, spec_of: SpecOf, disk: Disk
) -> None:
    spec = spec_of(corpus).model_copy(update={"out": str(disk.path / "tokens")})

    def fill(progress: Progress) -> None:
        if progress.stage == "encode":
            disk.fill()

    with pytest.raises(StorageError, match=r"no space left while writing .*tokens.* needs about 0\.\d+ GB"):
        build(spec, on_progress=fill)
    assert files_in(spec.out) == {}
    with pytest.raises(DataError, match="not a token dataset"):
        load_manifest(spec.out)
    disk.free()
    assert build(spec) == verify(spec.out)


def test_two_builds_never_write_to_one_out(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus)

    def second(progress: Progress) -> None:
        with pytest.raises(ConflictError, match="out is being written by"):
            build(spec)

    assert build(spec, on_progress=second) == verify(spec.out)
    assert build(spec) == verify(spec.out)


def full_disk() -> StorageError:
    error = StorageError("no space left.")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), DataError("gone"), full_disk(), AlteredError("tokens-1")])
def test_a_build_that_lost_its_claim_deletes_nothing_of_its_successor(
    corpus: Path, spec_of: SpecOf, error: BaseException | None
) -> None:
    spec = spec_of(corpus)
    out = Path(spec.out)
    of_successor = [out / name for name in ("manifest.json", "shards/00099.bin", ".partial/tokens-1")]

    def lose_claim(progress: Progress) -> None:
        if progress.stage != "encode" or of_successor[0].exists():
            return
        claim = out / ".claim.json"
        claim.write_text(json.dumps(json.loads(claim.read_text()) | {"token": "another"}))
        for file in of_successor:
            file.parent.mkdir(exist_ok=True)
            file.write_text("of the successor")
        if error is not None:
            raise error

    with pytest.raises(ConflictError if error is None else type(error)):
        build(spec, on_progress=lose_claim)
    assert [file.read_text() for file in of_successor] == ["of the successor"] * 3
    assert json.loads((out / ".claim.json").read_text())["token"] == "another"


def test_a_build_that_lost_its_claim_while_it_listed_its_inputs_clears_nothing(
    corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, real = spec_of(corpus), build_module.plan_chunks
    shard, claim = Path(spec.out, "shards", "00000.bin"), Path(spec.out, ".claim.json")

    def lose_claim(*args: Any) -> Any:
        claim.write_text(json.dumps(json.loads(claim.read_text()) | {"token": "another"}))
        shard.parent.mkdir()
        shard.write_text("of the successor")
        return real(*args)

    monkeypatch.setattr(build_module, "plan_chunks", lose_claim)
    with pytest.raises(ConflictError, match="taken over"):
        build(spec)
    assert shard.read_text() == "of the successor"


def test_an_input_that_changes_between_the_passes_is_found(
    corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = survey.survey_chunk

    def meddle(*args: Any) -> Any:
        found = real(*args)
        (corpus / "07.txt").write_text("changed after the survey")
        return found

    monkeypatch.setattr("raytide.pipelines.encode.survey_chunk", meddle)
    monkeypatch.setattr(survey, "CACHED_CHARS", 0)
    with pytest.raises(DataError, match="was changed during the build"):
        build(spec_of(corpus))


def test_progress_counts_up_to_the_manifest(corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_CHUNK_PARTS", 10)
    seen: list[Progress] = []
    manifest = build(spec_of(corpus), on_progress=seen.append)
    assert [stage for i, stage in enumerate(p.stage for p in seen) if i == 0 or seen[i - 1].stage != stage] == [
        "survey",
        "learn",
        "encode",
        "done",
    ]
    encoded = [p for p in seen if p.stage == "encode"]
    assert [p.documents for p in encoded] == sorted(p.documents for p in encoded)
    assert (seen[-1].documents, seen[-1].tokens) == (manifest.documents, manifest.tokens)
    assert seen[-1].documents_total == manifest.documents
    assert set(seen[-1].as_report()) >= {"stage", "documents", "tokens", "documents_per_s", "tokens_per_s"}


def test_a_small_build_needs_no_cluster_and_gives_the_same_bytes(corpus: Path, spec_of: SpecOf) -> None:
    build(spec_of(corpus))
    build_module.build(spec_of(corpus, out=str(corpus.parent / "other"), workers=3))
    assert files_in(str(corpus.parent / "other")) == files_in(spec_of(corpus).out)


def test_without_a_cluster_the_error_says_how_to_get_one(
    corpus: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "SMALL_BYTES", 100)
    with pytest.raises(ClusterError, match="not connected to a Ray cluster") as caught:
        build_module.build(spec_of(corpus))
    assert "raytide up" in caught.value.hint
    assert not Path(spec_of(corpus).out).exists()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_file_whose_name_is_not_utf8_is_a_document(tmp_path: Path, spec_of: SpecOf, form: str) -> None:
    (tmp_path / "in").mkdir()
    with open(os.fsencode(tmp_path / "in") + b"/caf\xe9.txt", "wb") as file:
        file.write(b"one two three four five\n" * 20)
    manifest = build(spec_of(tmp_path / "in", texts=form))
    assert (manifest.documents, manifest.texts[0].documents) == (1, 1)


def test_a_build_to_an_object_store_clears_what_a_killed_build_left(aws: None, corpus: Path, spec_of: SpecOf) -> None:
    """There, a folder is gone with its last file."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="datasets")
    spec = spec_of(corpus, out="s3://datasets/one", texts="jsonl", shard_tokens=10_000)
    manifest = build(spec)
    client.delete_object(Bucket="datasets", Key="one/manifest.json")
    assert build(spec) == manifest
