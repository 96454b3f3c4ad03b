"""A killed build goes on from its finished chunks, and its bytes are those of a build that was never killed."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raytide.core.errors import ClusterError, DataError, StorageError
from raytide.core.io.token_dataset import verify
from raytide.core.specs.data import DataSpec, TokenizerSpec
from raytide.pipelines import build as build_module
from raytide.pipelines import encode, inputs
from raytide.pipelines.build import build
from raytide.pipelines.chunk_store import AlteredError
from raytide.pipelines.inputs import group_chunks
from raytide.pipelines.passes import Progress
from raytide.pipelines.readers.base import InputPart
from raytide.pipelines.runners.inline import InlineRunner

SpecOf = Callable[..., DataSpec]
SCRIPT = Path(__file__).with_name("killed_builds.py")


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_CHUNK_PARTS", 1)


def files_in(out: str | Path) -> dict[str, bytes]:
    """A kill may leave a claim that was not yet written; it is no part of the dataset."""
    files = (path for path in sorted(Path(out).rglob("*")) if path.is_file() and ".claim" not in path.name)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def killed(corpus: Path, out: Path, tokenizer: str, kills: int, seed: int) -> list[list[int]]:
    """Runs of a build: the chunks finished before and after each, its exit code, and 1 if the dataset is complete."""
    args = [sys.executable, str(SCRIPT), str(corpus), str(out), tokenizer, str(kills), str(seed)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [[int(number) for number in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.soak
@pytest.mark.parametrize("is_given", [False, True])
def test_after_twenty_kills_the_bytes_are_those_of_a_build_that_ran_through(
    corpus: Path, tmp_path: Path, is_given: bool
) -> None:
    """A tokenizer that is given makes survey and encoding one pass; each run has 1, 2 or 4 threads."""
    killed(corpus, tmp_path / "whole", "", 0, 0)
    tokenizer = str(tmp_path / "whole" / "tokenizer.json") if is_given else ""
    if is_given:
        killed(corpus, tmp_path / "reference", tokenizer, 0, 0)
    runs = killed(corpus, tmp_path / "out", tokenizer, 20, seed=7)
    assert len(runs) == 21
    assert runs[-1][2] == 0
    during = [run for run in runs if run[2] == -9]
    assert len(during) >= 10, "so many runs were killed before they had ended"
    kept = all(after >= before or is_built for before, after, _, is_built in during)
    assert kept, "no kill takes a finished chunk away before the dataset is complete"
    assert any(run[0] > 0 for run in runs), "a run found chunks of one before"
    assert files_in(tmp_path / "out") == files_in(tmp_path / ("reference" if is_given else "whole"))
    verify(str(tmp_path / "out"))


def test_the_chunks_that_a_kill_left_beside_a_complete_dataset_are_removed(corpus: Path, spec_of: SpecOf) -> None:
    spec = spec_of(corpus)
    manifest = build(spec, runner=InlineRunner())
    left = Path(spec.out, ".partial")
    left.mkdir()
    (left / "survey-1").write_bytes(b"x")
    assert build(spec, runner=InlineRunner()) == manifest
    assert not left.exists()


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("form", ["bin", "parquet"])
def test_any_number_of_threads_builds_the_same_bytes(corpus: Path, spec_of: SpecOf, threads: int, form: str) -> None:
    one, many = str(corpus.parent / "one"), str(corpus.parent / "many")
    build(spec_of(corpus, out=one, format=form, texts="parquet"), runner=InlineRunner())
    build(spec_of(corpus, out=many, format=form, texts="parquet"), runner=InlineRunner(threads))
    assert files_in(one) == files_in(many)


class Counted:
    """Counts the chunks that are read, and fails at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.fail_at: int | None = None
        self.error: BaseException = KeyboardInterrupt()
        self._real = encode.survey_chunk
        monkeypatch.setattr(encode, "survey_chunk", self)

    def __call__(self, parts: Sequence[InputPart], *rest: Any) -> Any:
        self.read.append(parts[0].url)
        if len(self.read) == self.fail_at:
            raise self.error
        return self._real(parts, *rest)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def test_a_build_that_goes_on_reads_no_finished_chunk_again(corpus: Path, spec_of: SpecOf, counted: Counted) -> None:
    counted.fail_at = 20
    with pytest.raises(KeyboardInterrupt):
        build(spec_of(corpus), runner=InlineRunner())
    counted.fail_at, first = None, counted.read[:-1]
    counted.read = []
    seen: list[Progress] = []
    manifest = build(spec_of(corpus), on_progress=seen.append, runner=InlineRunner())
    assert len(first) == 19
    assert set(counted.read).isdisjoint(first)
    assert manifest.source.read == 45
    assert [p.documents for p in seen if p.stage == "survey"][-1] == 45, "finished chunks count as progress"
    assert not Path(spec_of(corpus).out, ".partial").exists()


def test_a_damaged_file_costs_no_other_file_s_work(corpus: Path, spec_of: SpecOf, counted: Counted) -> None:
    (corpus / "zz.jsonl.gz").write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(DataError, match=r"zz\.jsonl\.gz.*damaged"):
        build(spec_of(corpus), runner=InlineRunner())
    assert len(counted.read) == 46
    counted.read = []
    manifest = build(spec_of(corpus, exclude=("zz.*",)), runner=InlineRunner())
    assert counted.read == []
    assert manifest.source.read == 45
    again = spec_of(corpus, damaged="drop", out=str(corpus.parent / "drop"))
    assert build(again, runner=InlineRunner()).source.dropped["damaged"] == 1


def test_another_tokenizer_reads_the_documents_again_and_surveys_none(
    corpus: Path, spec_of: SpecOf, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(spec_of(corpus, out=str(corpus.parent / "first")), runner=InlineRunner())
    counted.read = []

    def fail(*_: object) -> None:
        raise ClusterError("lost")

    monkeypatch.setattr(build_module, "plan_shards", fail)
    with pytest.raises(ClusterError):
        build(spec_of(corpus), runner=InlineRunner())
    monkeypatch.undo()
    counted.__init__(monkeypatch)  # type: ignore[misc]
    given = TokenizerSpec(file=str(corpus.parent / "first" / "tokenizer.json"))
    assert build(spec_of(corpus, tokenizer=given), runner=InlineRunner()).documents == 40


def test_a_changed_file_is_read_again_and_no_other(corpus: Path, spec_of: SpecOf, counted: Counted) -> None:
    counted.fail_at = 45
    with pytest.raises(KeyboardInterrupt):
        build(spec_of(corpus), runner=InlineRunner())
    (corpus / "01.txt").write_text("something new and different")
    counted.fail_at, counted.read = None, []
    build(spec_of(corpus), runner=InlineRunner())
    assert str(corpus / "01.txt") in counted.read
    assert len(counted.read) == 2


def test_a_chunk_that_was_altered_is_made_again(corpus: Path, spec_of: SpecOf, counted: Counted) -> None:
    whole = spec_of(corpus, out=str(corpus.parent / "whole"))
    build(whole, runner=InlineRunner())
    counted.fail_at, counted.read = 30, []
    with pytest.raises(KeyboardInterrupt):
        build(spec_of(corpus), runner=InlineRunner())
    for chunk in list(Path(spec_of(corpus).out, ".partial").glob("survey-*"))[:3]:
        chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    counted.fail_at, counted.read = None, []
    build(spec_of(corpus), runner=InlineRunner())
    assert len(counted.read) == 45 - 29 + 3
    assert files_in(spec_of(corpus).out) == files_in(whole.out)


@pytest.mark.parametrize("kind", ["tokens", "texts"])
def test_one_torn_chunk_costs_no_other_chunk(
    corpus: Path, spec_of: SpecOf, counted: Counted, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    whole, spec = (spec_of(corpus, out=str(corpus.parent / out), texts="jsonl") for out in ("whole", "out"))
    build(whole, runner=InlineRunner())
    partial, real, stored, torn = Path(spec.out, ".partial"), build_module.plan_shards, list[str](), Path()

    def tear(*args: Any) -> Any:
        nonlocal torn
        if not stored:
            stored.extend(path.name for path in partial.iterdir())
            torn = max(partial.glob(f"{kind}-*"), key=lambda path: path.stat().st_size)
            torn.write_bytes(b"")
        return real(*args)

    monkeypatch.setattr(build_module, "plan_shards", tear)
    with pytest.raises(AlteredError, match=f"{kind}-[0-9a-f]* was altered"):
        build(spec, runner=InlineRunner())
    left = {*stored} - {torn.name, torn.name.replace("tokens", "lengths")}
    assert {path.name for path in partial.iterdir()} == left
    counted.read = []
    build(spec, runner=InlineRunner())
    assert len(counted.read) == (kind == "texts")
    assert files_in(spec.out) == files_in(whole.out)


def test_a_learned_tokenizer_that_was_altered_is_learned_anew(
    corpus: Path, spec_of: SpecOf, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, spec = (spec_of(corpus, out=str(corpus.parent / out)) for out in ("whole", "out"))
    build(whole, runner=InlineRunner())

    def stop(*_: object) -> None:
        raise ClusterError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "plan_shards", stop)
        with pytest.raises(ClusterError):
            build(spec, runner=InlineRunner())
    (stored,) = Path(spec.out, ".partial").glob("tokenizer-*")
    stored.write_bytes(stored.read_bytes().replace(b"added_tokens", b"added_tokenz"))
    counted.read = []
    build(spec, runner=InlineRunner())
    assert counted.read == []
    assert files_in(spec.out) == files_in(whole.out)


@pytest.mark.parametrize("place", ["shards", ".partial/lengths"])
def test_a_write_that_fails_costs_no_finished_chunk(
    corpus: Path, spec_of: SpecOf, counted: Counted, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    real = os.replace

    def refuse(old: str, new: str) -> None:
        if place in str(new):
            raise OSError(errno.EIO, "Input/output error")
        real(old, new)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match="cannot write"):
        build(spec_of(corpus), runner=InlineRunner())
    assert not Path(spec_of(corpus).out, "shards").exists()
    monkeypatch.setattr(os, "replace", real)
    counted.read = []
    assert build(spec_of(corpus), runner=InlineRunner()) == verify(spec_of(corpus).out)
    assert counted.read == []


def test_files_without_a_version_are_read_again_by_each_run(
    corpus: Path, spec_of: SpecOf, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file could have changed meanwhile, and nothing would show it."""
    monkeypatch.setattr(inputs, "VERSION_KEYS", ())
    counted.fail_at = 20
    with pytest.raises(KeyboardInterrupt):
        build(spec_of(corpus), runner=InlineRunner())
    counted.fail_at, counted.read = None, []
    build(spec_of(corpus), runner=InlineRunner())
    assert len(counted.read) == 45


def test_a_file_that_is_added_moves_few_chunks() -> None:
    parts = [InputPart(f"/corpus/{i:05d}.txt", 1000, "v") for i in range(5000)]
    grown = sorted([*parts, InputPart("/corpus/00100a.txt", 1000, "v")], key=lambda part: part.url)
    before, after = (
        {chunk.parts for chunk in group_chunks(each, chunk_bytes=64_000, max_parts=512)} for each in (parts, grown)
    )
    assert len(before) > 70
    assert len(after - before) <= 5
