"""Whole builds with cleaning: documents, counts, samples, signatures, and what a change or an error leads to."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from raytide.core.errors import ConfigError, ConflictError, DataError
from raytide.core.io.token_dataset import TokenManifest, load_manifest, verify
from raytide.core.specs.data import DataSpec, TextFilter, TokenizerSpec, TrainTokenizer
from raytide.pipelines import build as build_module
from raytide.pipelines import inputs
from raytide.pipelines.cleaning.report import REPORT, SIGNATURES, CleaningReport
from raytide.pipelines.readers import jsonl
from raytide.pipelines.runners.inline import InlineRunner
from raytide.pipelines.tokenizer.bpe import train_bpe

SpecOf = Callable[..., DataSpec]


class Backwards(InlineRunner):
    """Finishes chunks in the opposite order, as a gang may."""

    def map(self, *args: Any, **kwargs: Any) -> Any:
        return reversed(list(super().map(*args, **kwargs)))


def build(spec: DataSpec, runner: InlineRunner | None = None) -> TokenManifest:
    return build_module.build(spec, runner=runner or InlineRunner())


def texts_in(manifest: TokenManifest, out: str) -> list[str]:
    ids = np.concatenate([np.fromfile(Path(out) / shard.file, manifest.dtype) for shard in manifest.shards])
    parts = np.split(ids, np.flatnonzero(ids == manifest.eos_id) + 1)
    tokenizer = AutoTokenizer.from_pretrained(out)
    return [tokenizer.decode(part[part != manifest.eos_id]) for part in parts if len(part)]


def report_of(out: str) -> CleaningReport:
    return CleaningReport.from_bytes((Path(out) / REPORT).read_bytes(), REPORT)


def words(source: random.Random, count: int) -> list[str]:
    return ["".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=source.randint(2, 9))) for _ in range(count)]


def write_rows(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def near_rows() -> list[str]:
    """Ten documents, and of each of the first five a copy with two words changed."""
    source = random.Random(0)
    documents = [words(source, 200) for _ in range(10)]
    for document in documents[:5]:
        copy = document.copy()
        copy[50], copy[150] = "changed", "twice"
        documents.append(copy)
    return [" ".join(document) for document in documents]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TokenizerSpec:
    (tmp_path / "tokenizer.json").write_bytes(train_bpe(["some text"] * 20, TrainTokenizer(vocab_size=300)))
    return TokenizerSpec(file=str(tmp_path / "tokenizer.json"))


def test_documents_are_cleaned_counted_and_sampled(tmp_path: Path, spec_of: SpecOf) -> None:
    rows = ["write to a@b.org now", "x" * 2000, "fine", "write to c@d.org now", "y z " * 200, "x@y.org " + "z" * 1500]
    spec = spec_of(
        write_rows(tmp_path / "in.jsonl", rows),
        filter=TextFilter(),
        cleaning={"rules": {"pii": True, "code": {"max_mean_line_chars": 900}}},
    )
    manifest = build(spec)
    assert texts_in(manifest, spec.out) == ["write to <EMAIL> now", "fine", rows[4]]
    assert manifest.source.dropped == {"code_long_line": 2, "duplicate": 1}  # equal once it is cleaned
    report = report_of(spec.out)
    assert report.changes == {"pii_email": 3}
    assert sum(report.kept_lengths) == 4 and sum(report.dropped_lengths) == 2
    assert manifest.source.samples is not None
    samples = [json.loads(line) for line in (Path(spec.out) / manifest.source.samples.file).read_text().splitlines()]
    assert [(each["reason"], each["row"]) for each in samples] == [
        ("code_long_line", 1),
        ("code_long_line", 5),
        ("duplicate", 3),
    ]
    assert samples[2]["text"] == "write to <EMAIL> now"
    assert "@" not in samples[1]["text"]
    assert verify(spec.out) == manifest
    assert build(spec) == manifest


@pytest.mark.parametrize("given", [False, True])
def test_the_first_of_near_duplicates_stays_whatever_the_order_of_work(
    tmp_path: Path,
    spec_of: SpecOf,
    near_rows: list[str],
    tokenizer: TokenizerSpec,
    given: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inputs, "MIN_CHUNK_BYTES", 1)
    for i, row in enumerate(near_rows):
        (tmp_path / f"{i:02}.txt").write_text(row)
    changes: dict[str, object] = {"filter": TextFilter(), "cleaning": {"near_duplicates": True}}
    changes |= {"tokenizer": tokenizer} if given else {}
    spec = spec_of(tmp_path / "*.txt", **changes)
    manifest = build(spec)
    assert manifest.source.dropped == {"near_duplicate": 5}
    assert texts_in(manifest, spec.out) == near_rows[:10]
    report = report_of(spec.out)
    assert (report.near_duplicate_clusters, report.largest_cluster) == (5, 2)
    assert manifest.source.samples is not None
    samples = [json.loads(line) for line in (Path(spec.out) / manifest.source.samples.file).read_text().splitlines()]
    assert [Path(each["detail"].split()[1].rstrip(",")).name for each in samples] == [f"{i:02}.txt" for i in range(5)]
    assert [each["text"] for each in samples] == [row[:400] for row in near_rows[10:]]
    other = spec_of(tmp_path / "*.txt", **changes, out=str(tmp_path / "other"))
    assert build(other, Backwards()) == manifest


def test_documents_near_an_earlier_dataset_are_dropped(tmp_path: Path, spec_of: SpecOf, near_rows: list[str]) -> None:
    first = spec_of(
        write_rows(tmp_path / "a.jsonl", near_rows[:10]),
        out=str(tmp_path / "first"),
        filter=TextFilter(),
        cleaning={"near_duplicates": True},
    )
    build(first)
    fresh = " ".join(words(random.Random(9), 200))
    path = write_rows(tmp_path / "b.jsonl", [*near_rows[10:], fresh])
    near = {"against": [first.out]}
    spec = spec_of(path, out=str(tmp_path / "second"), filter=TextFilter(), cleaning={"near_duplicates": near})
    manifest = build(spec)
    assert manifest.source.dropped == {"near_earlier_dataset": 5}
    assert texts_in(manifest, spec.out) == [fresh]
    changed = {"near_duplicates": {**near, "seed": 1}}
    with pytest.raises(ConfigError, match='"seed": 0'):
        build(spec_of(path, out=str(tmp_path / "x"), filter=TextFilter(), cleaning=changed))
    (Path(first.out) / SIGNATURES).write_bytes(b"altered" * 10)
    with pytest.raises(DataError, match=r"signatures\.bin was altered"):
        build(spec_of(path, out=str(tmp_path / "x"), filter=TextFilter(), cleaning={"near_duplicates": near}))
    path = write_rows(tmp_path / "c.jsonl", near_rows[:3])
    without = spec_of(path, out=str(tmp_path / "third"), filter=TextFilter())
    build(without)
    with pytest.raises(ConfigError, match="holds no signatures"):
        build(spec_of(path, out=str(tmp_path / "x"), cleaning={"near_duplicates": {"against": [without.out]}}))


@pytest.mark.parametrize("given", [False, True])
def test_repeated_substrings_are_cut_out(
    tmp_path: Path, spec_of: SpecOf, tokenizer: TokenizerSpec, given: bool
) -> None:
    source = random.Random(1)
    shared, own = " ".join(words(source, 60)), [" ".join(words(source, 30)) for _ in range(4)]
    rows = [f"{own[0]} {shared}. {own[1]}", f"{own[2]} {shared}. {own[3]}", shared, own[0]]
    changes = {"tokenizer": tokenizer} if given else {}
    path = write_rows(tmp_path / "in.jsonl", rows)
    spec = spec_of(path, filter=TextFilter(), cleaning={"substrings": True}, **changes)
    manifest = build(spec)
    assert texts_in(manifest, spec.out) == [rows[0], f"{own[2]} . {own[3]}", own[0]]
    assert manifest.source.dropped == {"repeated_substrings": 1}


def test_texts_cannot_be_written_beside_cut_tokens(spec_of: SpecOf) -> None:
    with pytest.raises(ValueError, match=r"texts cannot be written with cleaning\.substrings"):
        spec_of("x", texts="jsonl", cleaning={"substrings": True})


@pytest.mark.parametrize("cleaning", [{"substrings": True}, {"sources": {"*": {"c4": True}}}])
def test_steps_that_would_cut_turns_are_refused(spec_of: SpecOf, cleaning: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"cannot be combined with records messages: it would cut turns"):
        spec_of("x", records="messages", cleaning=cleaning)


def test_a_stage_makes_documents_and_its_code_is_part_of_the_dataset(tmp_path: Path, spec_of: SpecOf) -> None:
    stage = tmp_path / "stage.py"
    stage.write_text("def split(text):\n    return text.split('|')\n")
    path = write_rows(tmp_path / "in.jsonl", ["one|two", "three", "one"])
    cleaning = {"rules": {"stages": [{"function": f"{stage}:split", "kind": "flat_map"}]}}
    spec = spec_of(path, filter=TextFilter(), cleaning=cleaning)
    manifest = build(spec)
    assert texts_in(manifest, spec.out) == ["one", "two", "three"]
    assert (manifest.source.read, manifest.source.dropped) == (4, {"duplicate": 1})
    stage.write_text("def split(text):\n    return text.split('_')\n")
    with pytest.raises(ConflictError, match="another spec or of other inputs"):
        build(spec)


def test_a_stage_that_raises_names_the_row_and_finished_work_is_kept(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MIN_CHUNK_BYTES", 1)
    stage = tmp_path / "stage.py"
    stage.write_text("def check(text):\n    return text[int('1' + text.removeprefix('row')) and 0:]\n")
    for name, rows in (("a", ["row1", "row2"]), ("b", ["row3", "row4", "bad"])):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    cleaning = {"rules": {"stages": [{"function": f"{stage}:check"}]}}
    spec = spec_of(tmp_path / "*.jsonl", filter=TextFilter(), cleaning=cleaning)
    with pytest.raises(DataError, match=r"check failed on .*b\.jsonl, row 2: ValueError"):
        build(spec)
    assert not (Path(spec.out) / "manifest.json").exists()
    write_rows(tmp_path / "b.jsonl", ["row3"])
    assert build(spec).documents == 3


def test_evaluation_sets_are_part_of_the_dataset(tmp_path: Path, spec_of: SpecOf) -> None:
    source = random.Random(2)
    documents = [" ".join(words(source, 40)) for _ in range(3)]
    (tmp_path / "set.txt").write_text(documents[1])
    path = write_rows(tmp_path / "in.jsonl", documents)
    spec = spec_of(path, filter=TextFilter(), cleaning={"decontaminate": {"sets": [str(tmp_path / "set.txt")]}})
    manifest = build(spec)
    assert manifest.source.dropped == {"contaminated": 1}
    (tmp_path / "set.txt").write_text(documents[2])
    with pytest.raises(ConflictError):
        build(spec)


def test_a_dataset_without_cleaning_has_no_files_of_it(tmp_path: Path, spec_of: SpecOf) -> None:
    spec = spec_of(write_rows(tmp_path / "in.jsonl", ["one", "two"]))
    build(spec)
    source = load_manifest(spec.out).source
    assert source.cleaning is None and source.signatures is None
    assert not (Path(spec.out) / REPORT).exists()


def test_the_rules_of_a_source_hold_in_every_piece_of_a_file(
    tmp_path: Path, spec_of: SpecOf, tokenizer: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "SPLIT_BYTES", 200)
    monkeypatch.setattr(inputs, "MIN_CHUNK_BYTES", 1)
    path = write_rows(tmp_path / "mail.jsonl", [f"row {i}: a{i}@b.org" for i in range(20)])
    cleaning = {"sources": {"*.jsonl": {"pii": True}}}
    spec = spec_of(path, tokenizer=tokenizer, filter=TextFilter(), cleaning=cleaning)
    assert not any("@" in text for text in texts_in(build(spec), spec.out))
    assert report_of(spec.out).changes == {"pii_email": 20}
