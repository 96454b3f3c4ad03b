"""Every format, whole and damaged, compressed and not: the records that come out, and the errors."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytide.core.errors import DataError
from raytide.core.io.storage import open_url, write_bytes
from raytide.core.specs.data import DataSpec
from raytide.pipelines.inputs import find_inputs, split_parts
from raytide.pipelines.readers import jsonl
from raytide.pipelines.readers.base import DamagedError, Drop, InputFile, InputPart, ReadOptions, Record
from raytide.pipelines.readers.jsonl import JsonlReader
from raytide.pipelines.readers.registry import read_parts, reader_of

SpecOf = Callable[..., DataSpec]
KEEP = ReadOptions(drops_damaged=True)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda body: bytes(pa.compress(body, codec="zstd", asbytes=True)),
}


def records_in(spec: DataSpec) -> list[Record]:
    parts = list(split_parts(find_inputs(spec), spec))
    return [record for _, record in sorted(read_parts(parts, ReadOptions.from_spec(spec)), key=itemgetter(0))]


def texts(records: list[Record]) -> list[str]:
    return [record.decode() if isinstance(record, bytes) else record.reason for record in records]


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, body in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return stream.getvalue()


def pdf(text: str) -> bytes:
    """A PDF of one page, written by hand."""
    body = f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/Resources<</Font<</F1 5 0 R>>>>/Contents 4 0 R/MediaBox[0 0 612 792]>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(body), body),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, places = b"%PDF-1.4\n", []
    for i, each in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj%sendobj\n" % (i, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    return out + b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (
        size,
        table,
        size,
        len(out),
    )


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_and_jsonl_are_read_through_any_compression(tmp_path: Path, spec_of: SpecOf, suffix: str) -> None:
    lines = "\n".join(json.dumps({"text": f"line {i} ünï"}) for i in range(3000)).encode()
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](lines))
    (tmp_path / f"b.txt{suffix}").write_bytes(COMPRESS[suffix](b"whole\nfile"))
    found = texts(records_in(spec_of(tmp_path)))
    assert found == [*(f"line {i} ünï" for i in range(3000)), "whole\nfile"]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_fails_with_its_name_and_record_or_counts_as_one_drop(
    tmp_path: Path, spec_of: SpecOf, suffix: str, share: float
) -> None:
    lines = "\n".join(json.dumps({"text": f"line {i * i * 7919}"}) for i in range(40_000)).encode()
    body = COMPRESS[suffix](lines)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(body[: int(len(body) * share)] or body[:3])
    with pytest.raises(DamagedError, match=rf"a\.jsonl{suffix}, (after record \d+|at its first record): .*damaged"):
        records_in(spec_of(tmp_path))
    found = records_in(spec_of(tmp_path, damaged="drop"))
    assert isinstance(found[-1], Drop)
    assert found[-1].reason == "damaged"
    whole = [record for record in found[:-1] if isinstance(record, bytes)]
    assert texts(list(whole)) == [f"line {i * i * 7919}" for i in range(len(whole))]
    assert len(found) - len(whole) <= 2, "the damaged rest, and the record that it cuts"


def test_each_bad_line_of_jsonl_is_one_drop_with_its_reason(tmp_path: Path, spec_of: SpecOf) -> None:
    lines = [
        b'{"text": "good"}',
        b"",
        b" \t\r",
        b"{",
        b'["a list"]',
        b'{"text": null}',
        b'{"other": "x"}',
        b'{"text": 5}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": "also good"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    assert texts(records_in(spec_of(tmp_path))) == [
        "good", "not_json", "not_json", "no_text", "no_text", "no_text", "not_utf8", "not_utf8", "not_json",
        "also good",
    ]  # fmt: skip


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 40), st.booleans())
def test_a_file_of_lines_that_is_split_has_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], split_bytes: int, ends: bool
) -> None:
    file = tmp_path_factory.mktemp("lines") / "a.jsonl"
    wanted = ["x" * size + str(i) for i, size in enumerate(sizes)]
    file.write_text("\n".join(json.dumps({"text": text}) for text in wanted) + "\n" * ends)
    found = InputFile(str(file), file.stat().st_size, "v")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "SPLIT_BYTES", split_bytes)
        parts = JsonlReader().split(found, ReadOptions())
        assert len(parts) == max(1, -(-found.size // split_bytes))
        assert texts([record for _, record in read_parts(parts, ReadOptions())]) == wanted


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow_is_read_through_any_compression(tmp_path: Path, spec_of: SpecOf, form: str, suffix: str) -> None:
    table, stream = pa.table({"text": ["a", None, "c"]}), io.BytesIO()
    with (pa.ipc.new_file if form == "file" else pa.ipc.new_stream)(stream, table.schema) as out:
        out.write_table(table)
    (tmp_path / f"x.arrow{suffix}").write_bytes(COMPRESS[suffix](stream.getvalue()))
    assert texts(records_in(spec_of(tmp_path))) == ["a", "no_text", "c"]


@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow_is_read_as_a_file_and_as_a_stream(tmp_path: Path, spec_of: SpecOf, form: str) -> None:
    table = pa.table({"n": [1, 2, 3], "text": ["a", None, "c"]})
    writer = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with writer(tmp_path / "x.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=2)
    assert texts(records_in(spec_of(tmp_path))) == ["a", "no_text", "c"]
    body = (tmp_path / "x.arrow").read_bytes()
    (tmp_path / "x.arrow").write_bytes(body[: len(body) // 2])
    with pytest.raises(DamagedError, match=r"x\.arrow, (after record|at its first record)"):
        records_in(spec_of(tmp_path))


def test_a_row_group_of_parquet_that_is_corrupt_is_named_with_its_row(tmp_path: Path, spec_of: SpecOf) -> None:
    path = tmp_path / "x.parquet"
    rows = [f"row {i} " + "y" * 2000 for i in range(6)]
    pq.write_table(pa.table({"text": rows}), path, row_group_size=2, use_dictionary=False, compression="zstd")
    body = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    body[place : place + 30] = b"\xff" * 30
    path.write_bytes(bytes(body))
    with pytest.raises(DamagedError, match=r"x\.parquet: the file is damaged: row group 1, from row 2: "):
        records_in(spec_of(path))
    assert texts(records_in(spec_of(path, damaged="drop"))) == [*rows[:2], "damaged", *rows[4:]]


@pytest.mark.parametrize("body", [b"", b"PAR1", b"not parquet at all", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_a_parquet_file_without_a_footer_is_one_damaged_document(tmp_path: Path, spec_of: SpecOf, body: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(body)
    with pytest.raises(DamagedError, match=r"x\.parquet: the file is damaged: it is not a Parquet file"):
        records_in(spec_of(tmp_path))
    assert texts(records_in(spec_of(tmp_path, damaged="drop"))) == ["damaged"]


SAMPLES = {
    "shard/1.txt": b"one",
    "shard/1.cls": b"7",
    "shard/2.json": b'{"text": "two"}',
    "shard/3.cls": b"9",
    "shard/4.html": b"<html><body><main><p>four is a page of text</p></main></body></html>",
    "shard/5.seg.png": b"\x89PNG",
    "shard/5.txt": b"five",
}


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz", ".tar.zst"])
def test_a_tar_has_a_document_for_each_sample(tmp_path: Path, spec_of: SpecOf, suffix: str) -> None:
    compress = COMPRESS.get(suffix.removeprefix(".tar"), gzip.compress)
    (tmp_path / f"x{suffix}").write_bytes(compress(tar(SAMPLES)))
    assert texts(records_in(spec_of(tmp_path))) == ["one", "two", "no_text", "four is a page of text", "five"]


def test_the_text_column_chooses_the_member_of_a_tar(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "x.tar").write_bytes(tar({"1.txt": b"one", "1.caption": b"a cat", "2.txt": b"two"}))
    assert texts(records_in(spec_of(tmp_path, text_column="caption"))) == ["a cat", "two"]


@given(st.integers(0, 10_239))
def test_a_tar_that_is_cut_anywhere_before_its_end_is_found(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Also where a member ends, which Python's tarfile takes for the end. A block of zeros is enough of an end."""
    path = tmp_path_factory.mktemp("tar") / "x.tar"
    members = {f"{i}.txt": b"y" * 700 for i in range(5)}
    body = tar(members)
    content, padding = 5 * (512 + 1024), 1024 - 700
    path.write_bytes(body[:cut])
    part = InputPart(str(path), cut, reader="tar")
    found = [record for _, record in read_parts([part], KEEP)]
    if cut < content + 512 - padding:
        assert isinstance(found[-1], Drop)
        assert found[-1].reason == "damaged"
        with pytest.raises(DamagedError, match=r"x\.tar, (after record \d|at its first record): .*damaged"):
            list(read_parts([part], ReadOptions()))
    else:
        assert found == [*members.values()]


def test_pages_give_their_main_content_in_their_own_encoding(tmp_path: Path, spec_of: SpecOf) -> None:
    page = (
        "<html><head><meta charset='iso-8859-1'></head><body><nav><a href='/'>Home</a></nav>"
        "<article><p>Grüße, a long paragraph of text that matters.</p></article><footer>Imprint</footer></body></html>"
    )
    (tmp_path / "x.html").write_bytes(page.encode("latin-1"))
    assert texts(records_in(spec_of(tmp_path))) == ["Grüße, a long paragraph of text that matters."]
    assert texts(records_in(spec_of(tmp_path, readers={".html": "jsonl"}))) == ["not_utf8"]


def test_a_pdf_gives_the_text_of_its_pages_and_a_broken_one_is_dropped(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf("Hello from a page"))
    (tmp_path / "b.pdf").write_bytes(b"not a pdf")
    (tmp_path / "c.pdf").write_bytes(b"")
    assert texts(records_in(spec_of(tmp_path))) == ["Hello from a page", "not_pdf", "not_pdf"]


def test_a_reader_is_chosen_by_suffix_and_may_be_named(tmp_path: Path) -> None:
    names = ["a.jsonl", "a.ndjson.zst", "a.parquet", "a.tar.gz", "a.tgz", "a.htm", "a.json", "a", "a.log"]
    assert [reader_of(name, {}) for name in names] == [
        "jsonl", "jsonl", "parquet", "tar", "tar", "html", "text", "text", "text",
    ]  # fmt: skip
    assert reader_of("s3://x/a.log.gz", {".log": "jsonl"}) == "jsonl"
    assert reader_of("a.parquet", {".parquet": "text"}) == "text"


def test_every_format_is_read_from_any_fsspec_store(spec_of: SpecOf) -> None:
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["p"]}), table)
    bodies = {
        "a.jsonl.gz": gzip.compress(b'{"text": "j"}'),
        "b.parquet": table.getvalue(),
        "c.tar": tar({"1.txt": b"t"}),
        "d.txt": b"x",
    }
    for name, body in bodies.items():
        write_bytes(f"memory://formats/{name}", body)
    assert texts(records_in(spec_of("memory://formats"))) == ["j", "p", "t", "x"]


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem._open", refuse)
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text("x")
        part = InputPart(str(tmp_path / name), 1, reader=reader_of(name, {}))
        with pytest.raises(DataError, match=rf"cannot read .*{name}"):
            list(read_parts([part], ReadOptions()))


def test_two_colons_in_a_name_lead_to_no_other_file(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "IO").write_text("one")
    (tmp_path / "IO::Socket").write_text("two")
    (tmp_path / "a::b.jsonl").write_text('{"text": "three"}\n')
    assert texts(records_in(spec_of(tmp_path))) == ["one", "two", "three"]


def test_two_colons_in_a_url_of_an_object_store_are_part_of_a_name() -> None:
    assert open_url("s3://bucket/IO::Socket")[1] == "bucket/IO::Socket"


def test_a_name_with_brackets_is_no_pattern_in_a_store(spec_of: SpecOf) -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/brackets/[slug].tsx", b"page")
    store.pipe_file("/brackets/s.tsx", b"other")
    assert texts(records_in(spec_of("memory://brackets"))) == ["page", "other"]


def test_a_tar_with_a_damaged_header_is_found(tmp_path: Path, spec_of: SpecOf) -> None:
    """Python's tarfile takes such a header for the end of the archive."""
    body = bytearray(tar({f"{i}.txt": b"%d" % i for i in range(4)}))
    body[2 * 1024] ^= 1  # the first letter of the third name
    (tmp_path / "x.tar").write_bytes(body)
    with pytest.raises(DamagedError, match=r"x\.tar, after record \d: the file is damaged: a header is damaged"):
        records_in(spec_of(tmp_path))
    found = texts(records_in(spec_of(tmp_path, damaged="drop")))
    assert found[0] == "0"
    assert found[-1] == "damaged"
