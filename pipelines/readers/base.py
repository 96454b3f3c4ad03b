"""The types that all readers share: files, their parts, records, and errors."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Literal, Protocol, cast

from raytide.core.errors import DataError
from raytide.core.io.storage import is_local, open_url
from raytide.core.specs.data import DataSpec, ReaderName, RecordKind

PartReader = ReaderName | Literal["link"]
"""The name of a reader; `link` is the reader of links that lead to no file."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class InputFile:
    url: str
    size: int
    version: str
    """An ETag or a modification time, which changes with the content."""
    leads_nowhere: bool = False
    """A link that leads to no file (it is broken, goes in a circle, or leads to a folder), a pipe, or a socket."""


@dataclass(frozen=True, slots=True)
class InputPart:
    """The smallest unit of work: a file, or a piece of a file that can be read by itself."""

    url: str
    size: int
    version: str = ""
    reader: PartReader = "text"
    span: tuple[int, int] | None = None
    """The piece, in its reader's terms: a range of bytes, or a row group and the number of its first row."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A record without usable text, with the reason. The manifest counts these reasons."""

    reason: str
    detail: str = ""


Record = bytes | Drop
"""The text of a document in UTF-8, which is not checked yet."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options in a dataset spec that decide which records a file has."""

    text_column: str = "text"
    records: RecordKind = "text"
    drops_damaged: bool = False

    @classmethod
    def from_spec(cls, spec: DataSpec) -> ReadOptions:
        return cls(spec.text_column, spec.records, spec.damaged == "drop")


class Reader(Protocol):
    """The interface of a reader for files of one format."""

    def split(self, file: InputFile, options: ReadOptions) -> list[InputPart]:
        """Returns the parts of a file, in order. Raises DamagedError for a damaged file, and DataError for a file of
        another format.
        """

    def read(self, part: InputPart, options: ReadOptions) -> Iterator[Record]:
        """Yields the records of a part, in order. If the part is damaged, yields the records before the damage and then
        raises an error.

        Raises DamagedError or DataError for the same reasons as `split`.
        """


class DamagedError(DataError):
    """Raised when a file is truncated, or when its content does not have the format that its name indicates."""


UNREADABLE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
"""The errors of the decompressors for damaged data, beside OSError."""


def damaged(url: str, why: object, row: int | None = None) -> DamagedError:
    where = url if row is None else f"{url}, after record {row - 1}" if row else f"{url}, at its first record"
    return DamagedError(
        f"{where}: the file is damaged: {str(why).rstrip('.')[:300]}.",
        hint="Replace it, exclude it, or build with `damaged: drop`, which keeps and counts what can be read.",
    )


def missing(url: str) -> DataError:
    return DataError(
        f"{url} is missing on this node, but was found when the build started.",
        hint="Keep inputs unchanged, on storage that every node of the gang can read.",
    )


@contextmanager
def open_input(url: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading, with its content decompressed.

    Raises DamagedError if decompression or the disk fails, and DataError if the file no longer exists or may not be
    read.
    """
    fs, path = open_url(url)
    try:
        with _buffered(fs.open(path, "rb"), url) as raw, _decompressed(url, raw) as stream:
            yield stream
    except FileNotFoundError:
        raise missing(url) from None
    except PermissionError as error:
        raise DataError(f"cannot read {url}: {error}.", hint="Check its permissions.") from error
    except (*UNREADABLE, OSError) as error:
        raise damaged(url, error) from error


def _buffered(raw: IO[bytes], url: str) -> IO[bytes]:
    """Returns a stream whose `readline` takes a limit. Files of object stores have none."""
    return raw if is_local(url) else cast(IO[bytes], io.BufferedReader(cast(io.RawIOBase, raw), BUFFER_BYTES))


def _decompressed(url: str, raw: IO[bytes]) -> IO[bytes]:
    if url.endswith((".gz", ".tgz")):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if url.endswith(".bz2"):
        return cast(IO[bytes], bz2.BZ2File(raw))
    if url.endswith(".xz"):
        return cast(IO[bytes], lzma.LZMAFile(raw))
    if url.endswith(".zst"):
        import pyarrow as pa

        return cast(IO[bytes], io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw), "zstd"), BUFFER_BYTES))
    return raw


def without_compression(name: str) -> str:
    """Returns a file's name without the suffix of its compression, such as `.gz`."""
    return next((name[: -len(suffix)] for suffix in COMPRESSED if name.endswith(suffix)), name)
