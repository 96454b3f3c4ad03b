"""The reader of JSON Lines: each line is a JSON object. Uncompressed files are split by bytes, so that many workers can
read one file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import msgspec

from raytide.pipelines.readers.base import (
    COMPRESSED,
    UNREADABLE,
    Drop,
    InputFile,
    InputPart,
    ReadOptions,
    Record,
    damaged,
    open_input,
)
from raytide.pipelines.readers.conversation import record_of

SPLIT_BYTES = 8 << 20
BLOCK_BYTES = 1 << 18
MOST_LINE_BYTES = 1 << 28
"""The most bytes of a line. A longer one is not a record: the file is damaged."""
_LAST_SPACE = ord(" ")
"""No byte of white space is greater."""
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class JsonlReader:
    def split(self, file: InputFile, options: ReadOptions) -> list[InputPart]:
        if file.url.endswith(COMPRESSED) or file.size <= SPLIT_BYTES:
            return [InputPart(file.url, file.size, file.version, "jsonl")]
        starts = range(0, file.size, SPLIT_BYTES)
        spans = [(start, min(start + SPLIT_BYTES, file.size)) for start in starts]
        return [InputPart(file.url, end - start, file.version, "jsonl", (start, end)) for start, end in spans]

    def read(self, part: InputPart, options: ReadOptions) -> Iterator[Record]:
        with open_input(part.url) as stream:
            row = 0
            try:
                for line in _stream_lines(stream) if part.url.endswith(COMPRESSED) else _lines(stream, part.span):
                    if len(line) >= MOST_LINE_BYTES:
                        raise damaged(part.url, f"a line has over {MOST_LINE_BYTES >> 20} MiB", row)
                    if line and (line[0] > _LAST_SPACE or bytes(line).strip()):
                        yield json_record(line, options)
                        row += 1
            except (*UNREADABLE, OSError) as error:
                raise damaged(part.url, error, row) from error


def _stream_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a compressed file, also those before a damaged place."""
    while line := stream.readline(MOST_LINE_BYTES):
        yield line


def _lines(stream: IO[bytes], span: tuple[int, int] | None) -> Iterator[bytes | memoryview]:
    """Yields the lines that begin inside `span`, without a copy of each; all lines if there is none."""
    at, end = span or (0, 1 << 62)
    if at:  # the line that holds the byte before the span belongs to the span before
        stream.seek(at - 1)
        at += len(stream.readline(MOST_LINE_BYTES)) - 1
    rest = b""
    while at < end and len(rest) < MOST_LINE_BYTES and (block := stream.read(min(BLOCK_BYTES, end - at))):
        at, block, start = at + len(block), rest + block, 0
        view = memoryview(block)
        while (stop := block.find(b"\n", start)) >= 0:  # faster than `split`, which compares byte by byte
            yield view[start:stop]
            start = stop + 1
        rest = block[start:]
    if rest:
        yield rest + stream.readline(MOST_LINE_BYTES)


def json_record(line: bytes | memoryview, options: ReadOptions) -> Record:
    """Returns the record in a line of JSON."""
    try:
        row = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # Python's decoder also accepts NaN, a byte order mark and half a surrogate pair.
        try:
            row = json.loads(bytes(line))
        except UnicodeDecodeError as error:
            return Drop("not_utf8", str(error))
        except (ValueError, RecursionError) as error:
            return Drop("not_json", str(error))
    if not isinstance(row, dict):
        return Drop("not_json", f"a {type(row).__name__} where an object belongs")
    return record_of(row, options.text_column, options.records)
