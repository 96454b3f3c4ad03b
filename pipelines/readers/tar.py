"""The reader of WebDataset tars. Adjacent members whose names differ only in their suffixes form one sample.

The text of a sample is in the member with the suffix `text_column`. If the sample has no such member, the text is in
the member whose suffix comes first in SUFFIXES.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Self

from raytide.pipelines.readers.base import (
    UNREADABLE,
    Drop,
    InputFile,
    InputPart,
    ReadOptions,
    Record,
    damaged,
    open_input,
)
from raytide.pipelines.readers.documents import html_record, pdf_record
from raytide.pipelines.readers.jsonl import json_record

SUFFIXES = ("txt", "text", "md", "json", "html", "pdf")
BLOCK_BYTES = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class TarReader:
    def split(self, file: InputFile, options: ReadOptions) -> list[InputPart]:
        return [InputPart(file.url, file.size, file.version, "tar")]

    def read(self, part: InputPart, options: ReadOptions) -> Iterator[Record]:
        suffixes = tuple(dict.fromkeys((options.text_column, *SUFFIXES)))
        row = 0
        with open_input(part.url) as stream:
            watched = _Watched(stream)
            try:
                for members in _samples(watched, suffixes):
                    yield _record(members, suffixes, options)
                    row += 1
                if not watched.has_end():
                    raise tarfile.ReadError("it ends without an end-of-archive mark")
            except (tarfile.TarError, *UNREADABLE, OSError) as error:
                raise damaged(part.url, error, row) from None


def _samples(stream: IO[bytes] | _Watched, suffixes: tuple[str, ...]) -> Iterator[dict[str, bytes]]:
    """Yields, for each sample, the members that may have its text, by suffix."""
    key, members = None, dict[str, bytes]()
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:  # type: ignore[call-overload]
        for member in archive:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if key is not None and (folder, stem) != key:
                yield members
                members = {}
            key = (folder, stem)
            if suffix in suffixes:
                body = archive.extractfile(member)
                assert body is not None
                members[suffix] = body.read()
                if len(members[suffix]) < member.size:
                    raise tarfile.ReadError(f"{member.name} breaks off")
    if key is not None:
        yield members


def _record(members: dict[str, bytes], suffixes: tuple[str, ...], options: ReadOptions) -> Record:
    suffix = next((suffix for suffix in suffixes if suffix in members), None)
    if suffix is None:
        return Drop("no_text", "no member holds a text")
    body = members[suffix]
    if suffix == "json":
        return json_record(body, options)
    if suffix == "html":
        return html_record(body)
    return pdf_record(body) if suffix == "pdf" else body


class _Header(tarfile.TarInfo):
    """A member's header. A damaged one is an error: Python's tarfile takes it for the end of the archive."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.InvalidHeaderError as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"a header is damaged: {error}") from None


class _Watched:
    """A stream that remembers its last bytes, by which a truncated archive is detected: Python's tarfile reads it as a
    short one.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._tail = stream, b""

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        if data:
            self._tail = (self._tail + data)[-BLOCK_BYTES:] if len(data) < BLOCK_BYTES else data[-BLOCK_BYTES:]
        return data

    def has_end(self) -> bool:
        """Returns whether the rest of the stream ends with a block of zeros, as every archive does."""
        while self.read(BLOCK_BYTES << 8):
            pass
        return self._tail == bytes(BLOCK_BYTES)
