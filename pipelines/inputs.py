"""Finds the input files of a build, and plans the chunks in which they are processed."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from raytide.core.errors import DataError
from raytide.core.io.storage import is_local, open_url
from raytide.core.specs.data import DataSpec
from raytide.pipelines.readers.base import InputFile, InputPart, ReadOptions
from raytide.pipelines.readers.registry import reader_of, split_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

FOOTER_THREADS = 16
FOOTERS_AHEAD = 256
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
MAX_CHUNK_BYTES = 8 << 20
MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_PARTS = 512
CHUNKS = 64
"""The number of chunks that a small corpus is divided into; a large one has chunks of MAX_CHUNK_BYTES."""
_CUT_ODDS = 16


@dataclass(frozen=True, slots=True)
class InputChunk:
    """Consecutive parts of input files, which one task processes. `index` is the chunk's position in the dataset."""

    index: int
    parts: tuple[InputPart, ...]


def find_inputs(spec: DataSpec) -> list[InputFile]:
    """Returns the files of `spec.inputs`, each once, sorted by URL. Raises DataError for an input that does not exist.

    `include` and `exclude` select among the files below a folder. They do not apply to named files and patterns.
    """
    found: dict[str, InputFile] = {}
    for url in spec.inputs:
        fs, path = open_url(url)
        fs.invalidate_cache()  # this process may have listed the folder before
        for name, info in _files(fs, path, url, spec):
            full = name if is_local(url) else str(fs.unstrip_protocol(name))
            is_special = is_local(url) and info["type"] == "other"
            found[full] = (
                _special(name, info) if is_special else InputFile(full, int(info.get("size") or 0), version_of(info))
            )
    return [found[url] for url in sorted(found)]


def _special(path: str, info: dict[str, Any]) -> InputFile:
    """Returns the file to which a link leads. If it leads to no file, or to a pipe or a socket, whose reading might
    never end, returns a file of no bytes.
    """
    if not os.path.isfile(path):
        return InputFile(path, 0, version_of(info), leads_nowhere=True)
    target = os.stat(path)
    return InputFile(path, target.st_size, str(target.st_mtime))


def plan_chunks(spec: DataSpec, files: list[InputFile]) -> list[InputChunk]:
    """Returns the chunks of a corpus. They depend only on the files and the spec, so every gang computes the same
    chunks.
    """
    even_bytes = sum(file.size for file in files) // CHUNKS
    return group_chunks(
        split_parts(files, spec),
        chunk_bytes=min(max(even_bytes, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES),
        max_parts=MAX_CHUNK_PARTS,
    )


def split_parts(files: Iterable[InputFile], spec: DataSpec) -> Iterator[InputPart]:
    """Yields the parts of all files in order. Parquet footers are read ahead, by several threads."""
    options, ahead = ReadOptions.from_spec(spec), deque[Future[list[InputPart]] | list[InputPart]]()
    with ThreadPoolExecutor(FOOTER_THREADS) as pool:
        try:
            for file in files:
                reader = "link" if file.leads_nowhere else reader_of(file.url, spec.readers)
                if reader == "parquet":
                    ahead.append(pool.submit(split_file, file, reader, options))
                else:
                    ahead.append(split_file(file, reader, options))
                while ahead and (len(ahead) > FOOTERS_AHEAD or isinstance(ahead[0], list)):
                    yield from _parts(ahead.popleft())
            while ahead:
                yield from _parts(ahead.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


def _parts(split: Future[list[InputPart]] | list[InputPart]) -> list[InputPart]:
    return split if isinstance(split, list) else split.result()


def group_chunks(parts: Iterable[InputPart], *, chunk_bytes: int, max_parts: int) -> list[InputChunk]:
    """Groups consecutive parts into chunks of about `chunk_bytes`, so that each task is worth its overhead.

    Once a chunk has half of `chunk_bytes`, a hash of the next part's name decides if the chunk ends. Therefore an
    added or removed file changes only nearby chunks, not all later ones.
    """
    chunks: list[InputChunk] = []
    group: list[InputPart] = []
    group_bytes = 0
    for part in parts:
        is_full = group_bytes + part.size > chunk_bytes or len(group) == max_parts
        if group and (is_full or (group_bytes > chunk_bytes // 2 and _may_cut(part))):
            chunks.append(InputChunk(len(chunks), tuple(group)))
            group, group_bytes = [], 0
        group.append(part)
        group_bytes += part.size
    return [*chunks, InputChunk(len(chunks), tuple(group))] if group else chunks


def _may_cut(part: InputPart) -> bool:
    name = f"{part.url}{part.span}".encode(errors="surrogateescape")  # a file's name need not be UTF-8
    return zlib.crc32(name) % _CUT_ODDS == 0


def _files(fs: AbstractFileSystem, path: str, url: str, spec: DataSpec) -> Iterable[tuple[str, dict[str, Any]]]:
    if any(char in path for char in "*?["):
        matches = fs.glob(path, detail=True)
        return ((name, info) for name, info in matches.items() if info["type"] != "directory" and not _is_mark(name))
    try:
        info = fs.info(path)
    except FileNotFoundError:
        raise DataError(f"input {url} does not exist.", hint="Check the path.") from None
    if info["type"] == "file":
        return [(path, info)]
    tree = fs.find(path, detail=True)
    files = ((name, info) for name, info in tree.items() if not _is_mark(name))
    return ((name, info) for name, info in files if _is_included(name.removeprefix(path), spec))


def _is_mark(name: str) -> bool:
    """Returns whether this is the empty object that consoles of object stores make for a folder. It cannot be read."""
    return name.endswith("/")


def _is_included(relative: str, spec: DataSpec) -> bool:
    names = [name for name in relative.split("/") if name]
    if any(fnmatch(name, pattern) for name in names for pattern in spec.exclude):
        return False
    return not spec.include or names[-1].endswith(spec.include)


def version_of(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
