"""Finds a build's input files and reads their documents as bytes, which `filter` decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from raytide.core.errors import DataError
from raytide.core.io.storage import is_local, open_url
from raytide.core.specs.data import DataSpec

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PARQUET = ".parquet"
FOOTER_THREADS = 16
VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)


@dataclass(frozen=True, slots=True)
class InputFile:
    url: str
    size: int
    version: str
    """An ETag or a modification time, which changes with the content."""


@dataclass(frozen=True, slots=True)
class InputPart:
    """The smallest unit of work: a text file, or one row group of a Parquet file."""

    url: str
    size: int
    row_group: int | None = None


@dataclass(frozen=True, slots=True)
class InputChunk:
    """Consecutive parts that one task processes; `index` gives their order in the dataset."""

    index: int
    parts: tuple[InputPart, ...]


def find_inputs(spec: DataSpec) -> list[InputFile]:
    """Returns every file of `spec.inputs` once, sorted by URL. DataError for an input that does not exist."""
    found: dict[str, InputFile] = {}
    for url in spec.inputs:
        fs, path = open_url(url)
        for name, info in _files(fs, path, url, spec):
            full = name if is_local(url) else str(fs.unstrip_protocol(name))
            found[full] = InputFile(full, int(info.get("size") or 0), _version(info))
    return [found[url] for url in sorted(found)]


def split_parts(files: Iterable[InputFile], text_column: str) -> list[InputPart]:
    """Split files into parts: text files whole, Parquet files by row group. DataError without the text column."""
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        return [part for parts in pool.map(lambda file: _parts(file, text_column), files) for part in parts]


def group_chunks(parts: Sequence[InputPart], *, chunk_bytes: int, max_parts: int) -> list[InputChunk]:
    """Group consecutive parts up to about `chunk_bytes`, so that a task is worth its overhead."""
    chunks: list[InputChunk] = []
    group: list[InputPart] = []
    group_bytes = 0
    for part in parts:
        if group and (group_bytes + part.size > chunk_bytes or len(group) == max_parts):
            chunks.append(InputChunk(len(chunks), tuple(group)))
            group, group_bytes = [], 0
        group.append(part)
        group_bytes += part.size
    return [*chunks, InputChunk(len(chunks), tuple(group))] if group else chunks


def read_documents(parts: Sequence[InputPart], text_column: str) -> list[list[bytes | None]]:
    """Returns the documents of each part in order; None for a row without text. Remote text files are read
    concurrently."""
    texts = _read_text_files([part.url for part in parts if part.row_group is None])
    return [
        [texts[part.url]] if part.row_group is None else _read_row_group(part.url, part.row_group, text_column)
        for part in parts
    ]


def _files(fs: AbstractFileSystem, path: str, url: str, spec: DataSpec) -> list[tuple[str, dict[str, Any]]]:
    if any(char in path for char in "*?["):
        matches = fs.glob(path, detail=True)
        return [(name, info) for name, info in matches.items() if info["type"] == "file"]
    try:
        info = fs.info(path)
    except FileNotFoundError:
        raise DataError(f"input {url} does not exist.", hint="Check the path.") from None
    if info["type"] == "file":
        return [(path, info)]
    tree = fs.find(path, detail=True)
    return [(name, info) for name, info in tree.items() if _is_included(name.removeprefix(path), spec)]


def _is_included(relative: str, spec: DataSpec) -> bool:
    names = [name for name in relative.split("/") if name]
    if any(fnmatch(name, pattern) for name in names for pattern in spec.exclude):
        return False
    return not spec.include or names[-1].endswith(spec.include)


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")


def _parts(file: InputFile, text_column: str) -> list[InputPart]:
    if not file.url.endswith(PARQUET):
        return [InputPart(file.url, file.size)]
    import pyarrow as pa
    import pyarrow.parquet as pq

    fs, path = open_url(file.url)
    try:
        with fs.open(path, "rb") as stream:
            footer = pq.read_metadata(stream)
    except FileNotFoundError:
        raise _missing_error(file.url) from None
    except pa.ArrowInvalid as error:
        raise DataError(f"{file.url} is not a Parquet file: {error}.", hint="Exclude it, or write it again.") from None
    columns = footer.schema.to_arrow_schema().names
    if text_column not in columns:
        raise DataError(
            f"{file.url} has no column {text_column!r}; it has {', '.join(columns)}.",
            hint="Set text_column to the column that holds the text.",
        )
    return [InputPart(file.url, footer.row_group(i).total_byte_size, row_group=i) for i in range(footer.num_row_groups)]


def _read_text_files(urls: list[str]) -> dict[str, bytes]:
    if not urls:
        return {}
    paths = {open_url(url)[1]: url for url in urls}
    texts: dict[str, bytes] = {}
    for path, content in open_url(urls[0])[0].cat(list(paths), on_error="return").items():
        if isinstance(content, FileNotFoundError):
            raise _missing_error(paths[path]) from None
        if isinstance(content, Exception):
            raise DataError(f"cannot read {paths[path]}: {content}.", hint="Check its permissions.") from content
        texts[paths[path]] = content
    return texts


def _read_row_group(url: str, row_group: int, text_column: str) -> list[bytes | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fs, path = open_url(url)
    try:
        with fs.open(path, "rb") as stream:
            column = pq.ParquetFile(stream).read_row_group(row_group, columns=[text_column]).column(0)
            documents: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    except FileNotFoundError:
        raise _missing_error(url) from None
    except pa.ArrowException as error:
        raise DataError(
            f"cannot read column {text_column!r} of {url}: {error}.", hint="It must hold strings."
        ) from None
    return documents


def _missing_error(url: str) -> DataError:
    return DataError(
        f"{url} is missing on this node, but was found when the build started.",
        hint="Keep inputs unchanged, on storage that every node of the gang can read.",
    )
