"""Readers of Parquet files, and of Arrow IPC files and streams. A Parquet file is split into its row groups. Each row
is a record.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from raytide.core.errors import DataError
from raytide.core.io.storage import open_url
from raytide.pipelines.readers.base import (
    Drop,
    InputFile,
    InputPart,
    ReadOptions,
    Record,
    damaged,
    missing,
    open_input,
)
from raytide.pipelines.readers.conversation import record_of

if TYPE_CHECKING:
    import pyarrow as pa

FILE_MAGIC = b"ARROW1"
COLUMNS = {"messages": ("messages",), "preference": ("prompt", "chosen", "rejected")}


@dataclass(frozen=True, slots=True)
class ParquetReader:
    def split(self, file: InputFile, options: ReadOptions) -> list[InputPart]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        fs, path = open_url(file.url)
        try:
            with fs.open(path, "rb") as stream:
                footer = pq.read_metadata(stream)
        except FileNotFoundError:
            raise missing(file.url) from None
        except (pa.ArrowException, OSError) as error:
            raise damaged(file.url, f"it is not a Parquet file: {error}") from None
        _check_columns(file.url, footer.schema.to_arrow_schema(), options)
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        first_rows = accumulate((group.num_rows for group in groups), initial=0)
        return [
            InputPart(file.url, group.total_byte_size, file.version, "parquet", (i, first_row))
            for i, (group, first_row) in enumerate(zip(groups, first_rows, strict=False))
        ]

    def read(self, part: InputPart, options: ReadOptions) -> Iterator[Record]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if part.span is None:  # its footer could not be read when the build began
            self.split(InputFile(part.url, part.size, part.version), options)
            raise damaged(part.url, "its footer could not be read when the build started")
        fs, path = open_url(part.url)
        group, first_row = part.span
        try:
            with fs.open(path, "rb") as stream:
                table = pq.ParquetFile(stream).read_row_group(group, columns=_columns(options))
        except FileNotFoundError:
            raise missing(part.url) from None
        except (pa.ArrowException, OSError) as error:
            raise damaged(part.url, f"row group {group}, from row {first_row}: {error}") from None
        yield from _records(part.url, table.to_batches(), options)


@dataclass(frozen=True, slots=True)
class ArrowReader:
    def split(self, file: InputFile, options: ReadOptions) -> list[InputPart]:
        return [InputPart(file.url, file.size, file.version, "arrow")]

    def read(self, part: InputPart, options: ReadOptions) -> Iterator[Record]:
        import pyarrow as pa

        row = 0
        with open_input(part.url) as stream:
            try:
                begin = stream.read(len(FILE_MAGIC))
                is_file = begin == FILE_MAGIC
                if stream.seekable():
                    stream.seek(0)
                else:  # compressed with zstd
                    stream = io.BytesIO(begin + stream.read())
                reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
                _check_columns(part.url, reader.schema, options)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
                for batch in batches:
                    yield from _records(part.url, [batch.select(_columns(options))], options)
                    row += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise damaged(part.url, error, row) from None


def _columns(options: ReadOptions) -> list[str]:
    return list(COLUMNS.get(options.records, (options.text_column,)))


def _check_columns(url: str, schema: pa.Schema, options: ReadOptions) -> None:
    for column in _columns(options):
        if column not in schema.names:
            raise DataError(
                f"{url} has no column {column!r}; it has {', '.join(schema.names)}.",
                hint="Set text_column to the column that holds the text.",
            )


def _records(url: str, batches: Iterable[pa.RecordBatch], options: ReadOptions) -> Iterator[Record]:
    import pyarrow as pa

    for batch in batches:
        if options.records != "text":
            for row in batch.to_pylist():
                yield record_of(row, options.text_column, options.records)
            continue
        column = batch.column(0)
        try:
            texts = column.cast(pa.large_binary())
        except pa.ArrowException as error:
            raise DataError(
                f"cannot read column {options.text_column!r} of {url}: {error}.", hint="It must hold strings."
            ) from None
        for text in texts.to_pylist():
            yield Drop("no_text") if text is None else text
