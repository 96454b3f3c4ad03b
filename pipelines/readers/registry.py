"""Chooses a reader by a file's suffix, and reads parts with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from raytide.core.errors import DataError
from raytide.core.io.storage import is_local, open_url
from raytide.core.specs.data import ReaderName
from raytide.pipelines.readers.base import (
    COMPRESSED,
    DamagedError,
    Drop,
    InputFile,
    InputPart,
    PartReader,
    Reader,
    ReadOptions,
    Record,
    missing,
    without_compression,
)
from raytide.pipelines.readers.columns import ArrowReader, ParquetReader
from raytide.pipelines.readers.documents import DocumentReader, LinkReader, html_record, pdf_record
from raytide.pipelines.readers.jsonl import JsonlReader
from raytide.pipelines.readers.tar import TarReader

READERS: Mapping[PartReader, Reader] = {
    "text": DocumentReader("text"),
    "jsonl": JsonlReader(),
    "parquet": ParquetReader(),
    "arrow": ArrowReader(),
    "tar": TarReader(),
    "html": DocumentReader("html", html_record),
    "pdf": DocumentReader("pdf", pdf_record),
    "link": LinkReader(),
}
BY_SUFFIX: Mapping[str, ReaderName] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
    ".html": "html",
    ".htm": "html",
    ".pdf": "pdf",
}
FETCHED_AT_ONCE = 64


def reader_of(url: str, chosen: Mapping[str, ReaderName]) -> ReaderName:
    """Returns the name of the reader for a file's suffix. `chosen` maps suffixes to readers and overrides the built-in
    table.

    A file with an unknown suffix gets the text reader.
    """
    name = url.rsplit("/", 1)[-1]
    for candidate in (name, without_compression(name)):
        for suffix, reader in (*chosen.items(), *BY_SUFFIX.items()):
            if candidate.endswith(suffix):
                return reader
    return "text"


def split_file(file: InputFile, reader: PartReader, options: ReadOptions) -> list[InputPart]:
    """Returns a file's parts. If the options say that damaged files are dropped, a damaged file has one part. Reading
    this part yields a record that describes the damage.
    """
    try:
        return READERS[reader].split(file, options)
    except DamagedError:
        if not options.drops_damaged:
            raise
        return [InputPart(file.url, file.size, file.version, reader)]


def read_parts(parts: Sequence[InputPart], options: ReadOptions) -> Iterator[tuple[int, Record]]:
    """Yields each record with the index of its part. Remote text files are fetched concurrently."""
    for start in range(0, len(parts), FETCHED_AT_ONCE):
        group = parts[start : start + FETCHED_AT_ONCE]
        fetched = _fetch([part.url for part in group if part.reader == "text" and not part.url.endswith(COMPRESSED)])
        for i, part in enumerate(group, start):
            if part.url in fetched:
                yield i, fetched[part.url]
            else:
                for record in _read(part, options):
                    yield i, record


def _read(part: InputPart, options: ReadOptions) -> Iterator[Record]:
    try:
        yield from READERS[part.reader].read(part, options)
    except DamagedError as error:
        if not options.drops_damaged:
            raise
        yield Drop("damaged", error.message)


def _fetch(urls: list[str]) -> dict[str, bytes]:
    """Returns the content of each file."""
    texts: dict[str, bytes] = {}
    for _, group in groupby(urls, key=lambda url: url.partition("://")[0] if not is_local(url) else ""):
        for url, content in _contents(list(group)):
            if isinstance(content, FileNotFoundError):
                raise missing(url) from None
            if isinstance(content, Exception):
                raise DataError(f"cannot read {url}: {content}.", hint="Check its permissions.") from content
            texts[url] = content
    return texts


def _contents(urls: list[str]) -> Iterator[tuple[str, bytes | Exception]]:
    if is_local(urls[0]):
        for url in urls:
            fs, path = open_url(url)
            try:
                yield url, bytes(fs.cat_file(path))
            except OSError as error:
                yield url, error
        return
    paths = [open_url(url)[1] for url in urls]
    found = open_url(urls[0])[0].cat_ranges(paths, None, None, on_error="return")  # `cat` takes brackets for a pattern
    yield from zip(urls, found, strict=True)
