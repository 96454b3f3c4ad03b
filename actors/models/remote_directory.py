"""A model directory in an object store: its files, the digest of its content, and a parallel copy that uses little
memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytide.core.errors import ClusterError, DataError, RaytideError, WaitTimeoutError
from raytide.core.io.atomic_file import sync
from raytide.core.io.storage import open_url
from raytide.core.io.timeout import call_with_timeout

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

STALL_S = 120.0
"""The seconds without a part of a file, or without the result of a listing, after which a store is given up. A part is
about as much as a thread receives in a second.
"""
MOST_ENTRIES = 10_000
_PIECE_BYTES = 8 << 20
_LEAST_PART_BYTES = 128 << 10
_THREADS = 8
_POLL_S = 0.2
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken")
"""The files of a model or adapter that engines read; in subfolders only those that match the first pattern, JSON
(pooling).
"""
_CONTENT_TAG = re.compile(r"[0-9a-f]{32}(-[0-9]+)?|[A-Za-z0-9+/]{22}==|[0-9a-f]{40}|[0-9a-f]{64}")
"""A pattern for tags that depend on a file's content alone: S3's ETag, MD5 as base64, git's blob, SHA-256."""
_TAGS = ("sha256", "blob_id", "md5Hash", "ETag", "etag")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    path: str
    bytes: int
    tag: str
    """A value that changes with the file's content."""


@dataclass(frozen=True, slots=True)
class RemoteDirectory:
    """The files of a model directory in an object store, by name. Sizes and tags are those at the time of the
    listing.
    """

    url: str
    files: Mapping[str, RemoteFile]
    key: str
    """A digest of names, sizes and tags; also of the URL if some tag does not depend on the content alone."""

    @classmethod
    def read(cls, url: str) -> RemoteDirectory:
        """Lists the directory. Raises DataError if it is not a model directory or cannot be read, WaitTimeoutError if
        the listing takes too long.
        """

        def listing() -> dict[str, RemoteFile]:
            fs, root = open_url(url)
            fs.invalidate_cache()
            return dict(_files(fs, root, url))

        try:
            files = call_with_timeout(STALL_S, "the listing of a model", listing)
        except WaitTimeoutError:
            raise _stalled(url, STALL_S) from None
        except ClusterError as error:
            raise _unreadable(url, error.__cause__ or error) from error
        if not files.keys() & {"config.json", "adapter_config.json"}:
            raise DataError(
                f"{url} is not a model directory: it has no config.json.", hint="Check the URL; it names a folder."
            )
        return cls(url, files, _digest(url, files))

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def copy_to(self, folder: Path, on_progress: Callable[[int, int], None]) -> None:
        """Copies all files to a local folder. Each file must have exactly the length that was listed. Only a few pieces
        of files are in memory at a time.
        """
        fs, _ = open_url(self.url)
        for name in self.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = _Copy(fs, self, folder)
        for _ in range(_THREADS):
            threading.Thread(target=copy.run, name="copy of a model", daemon=True).start()
        done, moved_s = 0, time.monotonic()
        try:
            while not copy.ended.wait(_POLL_S):
                if copy.done > done:
                    done, moved_s = copy.done, time.monotonic()
                    on_progress(done, self.bytes)
                elif time.monotonic() - moved_s > STALL_S:
                    raise _stalled(self.url, STALL_S)
        finally:
            copy.is_cancelled = True
        if copy.error is not None:
            raise copy.error
        for path in (*folder.rglob("*"), folder):  # so that a crash of the machine leaves no whole folder of torn files
            sync(path)


class _Copy:
    """The common state of the threads that copy a directory."""

    def __init__(self, fs: AbstractFileSystem, remote: RemoteDirectory, folder: Path) -> None:
        self._fs, self._remote, self._folder = fs, remote, folder
        self._left = deque(
            (name, start) for name, file in remote.files.items() for start in range(0, max(1, file.bytes), _PIECE_BYTES)
        )
        self._lock = threading.Lock()
        self._running = _THREADS
        self._part_bytes = _LEAST_PART_BYTES
        self.done = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.is_cancelled = False

    def run(self) -> None:
        try:
            while not (self.is_cancelled or self.error):
                try:
                    name, start = self._left.popleft()
                except IndexError:
                    break
                self._piece(name, start)
        except BaseException as error:
            self.error = self.error or error
        with self._lock:
            self._running -= 1
            if self._running == 0 or self.error:
                self.ended.set()

    def _piece(self, name: str, start: int) -> None:
        """Copies a piece of a file, in parts whose size follows the store's speed."""
        end = min(start + _PIECE_BYTES, self._remote.files[name].bytes)
        while not self.is_cancelled:
            size, began_s = min(self._part_bytes, end - start), time.monotonic()
            self._part(name, start, size)
            took_s = time.monotonic() - began_s
            if took_s < 0.5:
                self._part_bytes = min(max(self._part_bytes, 2 * size), _PIECE_BYTES)
            elif took_s > 2.0:
                self._part_bytes = max(size // 2, _LEAST_PART_BYTES)
            start += size
            if start >= end:
                return

    def _part(self, name: str, start: int, size: int) -> None:
        file = self._remote.files[name]
        try:
            piece = self._fs.cat_file(file.path, start=start, end=start + size) if size else b""
        except Exception as error:
            raise _unreadable(f"{self._remote.url}: {name}", error) from error
        if len(piece) != size:
            raise DataError(
                f"{self._remote.url}: {name} has fewer bytes than the {file.bytes} that were listed.",
                hint="Use a model that is complete.",
            )
        if self.is_cancelled:
            return
        handle = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            written = 0
            while written < size:
                written += os.pwrite(handle, memoryview(piece)[written:], start + written)
        finally:
            os.close(handle)
        with self._lock:
            self.done += size


def _files(fs: AbstractFileSystem, root: str, url: str) -> Iterator[tuple[str, RemoteFile]]:
    root = root.rstrip("/")
    pending, seen = [root], 0
    while pending:
        folder = pending.pop()
        for info in _entries(fs, folder, url):
            seen += 1
            if seen > MOST_ENTRIES:
                raise DataError(f"{url} has more than {MOST_ENTRIES} entries.", hint="Name a folder of one model.")
            name = _name(str(info["name"]), root, url)
            parts = name.split("/")
            if any(part.startswith(".") for part in parts):
                continue
            if info["type"] == "directory":
                if folder == root and name:
                    pending.append(f"{root}/{name}")
            elif name and any(fnmatchcase(name, each) for each in (_WANTED if len(parts) == 1 else _WANTED[:1])):
                yield name, RemoteFile(str(info["name"]), int(info["size"] or 0), _tag(info))


def _entries(fs: AbstractFileSystem, folder: str, url: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = fs.ls(folder, detail=True)
    except RaytideError:
        raise
    except FileNotFoundError:
        raise DataError(f"{url} does not exist.", hint="Check the URL.") from None
    except Exception as error:
        raise _unreadable(url, error) from error
    return found


def _name(path: str, root: str, url: str) -> str:
    """Returns an entry's name relative to the directory; "" for the directory itself."""
    path = path.rstrip("/")
    if path == root:
        return ""
    name = path.removeprefix(f"{root}/")
    if (
        name == path
        or any(part in ("", ".", "..") for part in name.split("/"))
        or "\\" in name
        or not name.isprintable()
    ):
        raise DataError(f"{url}: a file is named {path[:200]!r}.", hint="Names must stay in the folder.")
    return name


def _tag(info: Mapping[str, Any]) -> str:
    for each in (*_TAGS, *_TIMES):
        if info.get(each):
            return str(info[each]).strip('"')
    return ""


def _digest(url: str, files: Mapping[str, RemoteFile]) -> str:
    is_content = all(_CONTENT_TAG.fullmatch(file.tag) for file in files.values())
    listed = [[name, file.bytes, file.tag] for name, file in sorted(files.items())]
    text = json.dumps(["" if is_content else url, listed])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _stalled(url: str, timeout_s: float) -> WaitTimeoutError:
    return WaitTimeoutError(f"{url}: nothing arrived for {timeout_s:g} s.", hint="Check the store and the network.")


def _unreadable(what: str, error: BaseException) -> DataError:
    text = f"{type(error).__name__}: {error}"[:300]
    return DataError(f"cannot read {what}: {text}.", hint="Check the URL, and the credentials on the nodes.")
