import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.errors import DataError
from raytide.core.io.storage import write_bytes
from raytide.core.specs.data import DataSpec, TokenizerSpec, TrainTokenizer
from raytide.pipelines.build import build
from raytide.pipelines.inputs import find_inputs, group_chunks, split_parts
from raytide.pipelines.readers import jsonl
from raytide.pipelines.readers.base import Drop, InputPart, ReadOptions, Record
from raytide.pipelines.readers.conversation import record_of
from raytide.pipelines.readers.jsonl import json_record
from raytide.pipelines.readers.registry import read_parts
from raytide.pipelines.runners.inline import InlineRunner

SpecOf = Callable[..., DataSpec]


def read_documents(parts: list[InputPart]) -> list[list[Record]]:
    """Returns the records of each part, in order."""
    records: list[list[Record]] = [[] for _ in parts]
    for part, record in read_parts(parts, ReadOptions()):
        records[part].append(record)
    return records


def names(spec: DataSpec) -> list[str]:
    return [Path(file.url).name for file in find_inputs(spec)]


def write_parquet(path: Path, column: pa.Array, name: str = "text", rows: int = 2) -> Path:
    pq.write_table(pa.table({"n": pa.array(range(len(column))), name: column}), path, row_group_size=rows)
    return path


def test_a_directory_is_walked_and_sorted_by_path(corpus: Path, spec_of: SpecOf) -> None:
    urls = [file.url for file in find_inputs(spec_of(corpus))]
    assert len(urls) == 45
    assert urls == sorted(urls)


def test_include_and_exclude_choose_files_of_a_directory_by_name_at_any_depth(corpus: Path, spec_of: SpecOf) -> None:
    (corpus / "note.md").write_text("# note")
    assert names(spec_of(corpus, include=(".md",))) == ["note.md"]
    assert not any(
        file.url.startswith(str(corpus / "deep")) for file in find_inputs(spec_of(corpus, exclude=("deep",)))
    )
    assert "empty.txt" not in names(spec_of(corpus, exclude=("e*.txt",)))


def test_exclude_does_not_look_above_the_input_directory(corpus: Path, spec_of: SpecOf) -> None:
    assert len(names(spec_of(corpus, exclude=("corpus",)))) == 45


def test_a_file_that_is_named_is_taken_whatever_its_suffix(corpus: Path, spec_of: SpecOf) -> None:
    assert names(spec_of(corpus / "01.txt", include=(".md",))) == ["01.txt"]


def test_a_glob_gives_its_matches_and_an_input_given_twice_counts_once(corpus: Path, spec_of: SpecOf) -> None:
    assert names(spec_of(corpus / "0[12].txt", corpus / "01.txt")) == ["01.txt", "02.txt"]


def test_a_missing_input_is_named(tmp_path: Path, spec_of: SpecOf) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt does not exist"):
        find_inputs(spec_of(tmp_path / "nowhere.txt"))


def test_an_unknown_protocol_is_a_clear_error(spec_of: SpecOf) -> None:
    with pytest.raises(DataError, match="nosuch://x"):
        find_inputs(spec_of("nosuch://x"))


def test_documents_come_by_url_from_any_fsspec_store(spec_of: SpecOf) -> None:
    write_bytes("memory://bucket/a.txt", b"one")
    write_bytes("memory://bucket/b.txt", b"two")
    spec = spec_of("memory://bucket")
    assert read_documents([*split_parts(find_inputs(spec), spec)]) == [[b"one"], [b"two"]]


def test_a_changed_file_has_another_version(corpus: Path, spec_of: SpecOf) -> None:
    import os

    before = find_inputs(spec_of(corpus / "01.txt"))
    os.utime(corpus / "01.txt", (1, 1))
    assert find_inputs(spec_of(corpus / "01.txt")) != before


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.binary()])
def test_parquet_gives_a_part_for_each_row_group_and_none_for_null(
    tmp_path: Path, spec_of: SpecOf, type_: object
) -> None:
    path = write_parquet(tmp_path / "x.parquet", pa.array(["a", None, "ü"], type_))
    parts = [*split_parts(find_inputs(spec_of(path)), spec_of(path))]
    assert [part.span for part in parts] == [(0, 0), (1, 2)]
    assert read_documents(parts) == [[b"a", Drop("no_text")], ["ü".encode()]]


def test_parquet_without_the_text_column_says_which_it_has(tmp_path: Path, spec_of: SpecOf) -> None:
    path = write_parquet(tmp_path / "x.parquet", pa.array(["a"]), name="body")
    with pytest.raises(DataError, match=r"no column 'text'; it has n, body"):
        list(split_parts(find_inputs(spec_of(path)), spec_of(path)))


def test_parquet_whose_column_holds_no_strings_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", pa.array([1.5]))
    with pytest.raises(DataError, match="cannot read column 'text'"):
        read_documents([InputPart(str(path), 1, reader="parquet", span=(0, 0))])


def test_a_file_that_is_parquet_by_name_only_is_refused(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "x.parquet").write_text("not parquet at all")
    spec = spec_of(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: the file is damaged: it is not a Parquet file"):
        list(split_parts(find_inputs(spec), spec))


def test_a_file_that_vanished_since_the_build_began_is_named(tmp_path: Path) -> None:
    parquet = InputPart(str(tmp_path / "gone.parquet"), 1, reader="parquet", span=(0, 0))
    for part in (InputPart(str(tmp_path / "gone.txt"), 1), parquet):
        with pytest.raises(DataError, match=r"gone.* is missing on this node"):
            read_documents([part])


@given(st.lists(st.integers(0, 50)), st.integers(1, 60), st.integers(1, 5))
def test_chunks_keep_every_part_in_order_and_within_bounds(sizes: list[int], chunk_bytes: int, max_parts: int) -> None:
    parts = [InputPart(str(i), size) for i, size in enumerate(sizes)]
    chunks = group_chunks(parts, chunk_bytes=chunk_bytes, max_parts=max_parts)
    assert [part for chunk in chunks for part in chunk.parts] == parts
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        assert 1 <= len(chunk.parts) <= max_parts
        assert len(chunk.parts) == 1 or sum(part.size for part in chunk.parts) <= chunk_bytes


def test_links_are_read_as_what_they_lead_to_and_those_that_lead_to_no_file_are_counted(
    tmp_path: Path, spec_of: SpecOf
) -> None:
    root = tmp_path / "in"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_text("one")
    (tmp_path / "outside.txt").write_text("two")
    (root / "b.txt").symlink_to(tmp_path / "outside.txt")
    for name, target in (("broken.jsonl", "gone"), ("loop.txt", "loop.txt"), ("circle", "."), ("folder", "sub")):
        (root / name).symlink_to(target)
    for inputs in (root, root / "*"):
        spec = spec_of(inputs, tokenizer=TokenizerSpec(train=TrainTokenizer(vocab_size=300)))
        manifest = build(spec, runner=InlineRunner())
        assert (manifest.documents, manifest.source.dropped) == (2, {"link": 4})
        shutil.rmtree(spec.out)
    before = find_inputs(spec_of(root / "b.txt"))
    (tmp_path / "outside.txt").write_text("two and a half")
    assert find_inputs(spec_of(root / "b.txt")) != before, "a change of what a link leads to is noticed"


def test_a_pipe_is_not_waited_for(tmp_path: Path, spec_of: SpecOf) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    for inputs in (tmp_path, tmp_path / "*.txt"):
        assert [file.leads_nowhere for file in find_inputs(spec_of(inputs, include=("pipe.txt",)))] == [True]


def test_every_line_is_read_as_the_standard_library_reads_it() -> None:
    source = random.Random(5)
    lines = [
        b'{"text": "a\\u00e9\\n\xc3\xa9", "n": [1, 2.5e3, null, true, {"x": -0}], "b": 12345678901234567890123}',
        b'{"text": "x", "text": "y"}', b'{"a": NaN, "text": "z"}', b'\xef\xbb\xbf{"text":"bom"}',
        b'{"text": "\\ud800"}', b'{"text": "\\ud83d\\ude00"}', b'["a"]', b" 1 \r",
    ]  # fmt: skip
    for _ in range(4000):
        line = bytearray(source.choice(lines))
        for _ in range(source.randrange(4)):
            place = source.randrange(len(line))
            line[place : place + source.randrange(2)] = source.choice((b"", bytes([source.randrange(256)])))
            line = line or bytearray(b"0")
        try:
            row = json.loads(bytes(line))
            expected = record_of(row, "text", "text") if isinstance(row, dict) else Drop("not_json")
        except UnicodeDecodeError:
            expected = Drop("not_utf8")
        except ValueError:
            expected = Drop("not_json")
        found = json_record(bytes(line), ReadOptions())
        assert (found.reason if isinstance(found, Drop) else found) == (
            expected.reason if isinstance(expected, Drop) else expected
        ), bytes(line)


def test_the_name_of_a_part_need_not_be_utf8() -> None:
    parts = [InputPart("/a", 60), InputPart("/caf\udce9", 10)]
    assert sum(len(chunk.parts) for chunk in group_chunks(parts, chunk_bytes=100, max_parts=9)) == 2


def put(**files: bytes) -> None:
    """Puts objects into an S3 bucket, as another process does."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="corpus")
    for name, body in files.items():
        client.put_object(Bucket="corpus", Key=name, Body=body)


@pytest.mark.parametrize("url", ["s3://corpus/in", "s3://corpus/in/", "s3://corpus/in/**"])
@pytest.mark.parametrize("include", [(), (".txt",)])
def test_the_marks_of_folders_in_an_object_store_are_no_documents(
    aws: None, spec_of: SpecOf, url: str, include: tuple[str, ...]
) -> None:
    """The console makes an empty object `in/` for a folder."""
    put(**{"in/": b"", "in/a.txt": b"one", "in/deep/": b"", "in/deep/b #1 50%.txt": b"two"})
    spec = spec_of(url, include=include)
    assert names(spec) == ["a.txt", "b #1 50%.txt"]
    assert read_documents([*split_parts(find_inputs(spec), spec)]) == [[b"one"], [b"two"]]


@pytest.mark.parametrize("url", ["s3://corpus/in/*.txt", "s3://corpus/in/a.txt"])
def test_what_changed_in_an_object_store_is_seen_by_the_same_process(aws: None, spec_of: SpecOf, url: str) -> None:
    put(**{"in/a.txt": b"one"})
    both = spec_of(url, "s3://corpus/in/*.txt")
    assert [file.size for file in find_inputs(both)] == [3]
    put(**{"in/a.txt": b"another", "in/b.txt": b"two"})
    assert [file.size for file in find_inputs(both)] == [7, 3]
    put(**{"in/a.txt": b"1"})
    assert find_inputs(spec_of(url))[0].size == 1


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_in_an_object_store_are_split_and_read_without_a_line_feed_at_the_end(
    aws: None, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(jsonl, "SPLIT_BYTES", 1000)
    documents = [b"document %d" % i for i in range(200)]
    put(**{"in/a.jsonl": b"\n".join(b'{"text": "%s"}' % each for each in documents) + end})
    spec = spec_of("s3://corpus/in")
    parts = [*split_parts(find_inputs(spec), spec)]
    assert len(parts) > 1
    assert [record for part in read_documents(parts) for record in part] == documents
