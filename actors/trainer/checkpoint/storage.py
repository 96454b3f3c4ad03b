"""The storage of checkpoints: a local directory, or any fsspec URL. This module does not import torch.

A file is complete once its stream is closed. A folder becomes a checkpoint when its manifest is published, after all
other files. No rename is used, because object stores cannot rename. Local storage needs no fsspec, so that a bare GPU
machine can train.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from raytide.core.errors import CheckpointError
from raytide.core.io import storage
from raytide.core.io.atomic_file import sync
from raytide.core.io.private_paths import check_opened, safe_opener


class CheckpointStorage(Protocol):
    """The storage of a run's checkpoints: a local folder or an object store.

    Paths are relative to the storage root and use `/`. Methods raise FileNotFoundError for missing files.
    """

    url: str

    def folders(self) -> list[str]: ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the size in bytes of each file directly in a folder, by file name. Returns an empty dict if the
        folder does not exist.
        """

    def read(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Opens a file. Raises CheckpointError for a link, a pipe or a device."""

    def write(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Opens a new file as a context manager. The file is durable when the `with` block ends. If the block raises,
        no complete file is left.
        """

    def publish(self, path: str, body: bytes) -> None:
        """Writes a file atomically: a reader sees the whole file or no file."""

    def remove(self, folder: str, first: str) -> None:
        """Removes a folder and its files. The file `first` is removed before all others."""


def open_store(url: str) -> CheckpointStorage:
    return LocalStore(Path(url.removeprefix("file://"))) if storage.is_local(url) else UrlStore(url)


class LocalStore:
    def __init__(self, root: Path) -> None:
        self.root, self.url = root, str(root)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []

    def sizes(self, folder: str) -> dict[str, int]:
        path = self.root / folder
        if not path.is_dir():
            return {}
        found = ((file.name, file.lstat()) for file in path.iterdir())
        return {name: about.st_size for name, about in found if stat.S_ISREG(about.st_mode)}

    @contextmanager
    def read(self, path: str) -> Iterator[BinaryIO]:
        with open(self.root / path, "rb", opener=_open_file) as file:
            yield file

    @contextmanager
    def write(self, path: str) -> Iterator[BinaryIO]:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "wb", opener=safe_opener) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def publish(self, path: str, body: bytes) -> None:
        final = self.root / path
        part = final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.part")
        with self.write(str(part.relative_to(self.root))) as stream:
            stream.write(body)
        os.replace(part, final)
        for folder in (final.parent, self.root):
            sync(folder)

    def remove(self, folder: str, first: str) -> None:
        if (self.root / folder).is_symlink():  # keep the target
            (self.root / folder).unlink()
            return
        (self.root / folder / first).unlink(missing_ok=True)
        shutil.rmtree(self.root / folder, ignore_errors=True)


class UrlStore:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = storage.open_url(self.url)

    def folders(self) -> list[str]:
        return sorted(_name(entry) for entry in self._entries(self._root) if entry["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        entries = self._entries(self._at(folder))
        return {_name(entry): int(str(entry["size"])) for entry in entries if entry["type"] == "file"}

    @contextmanager
    def read(self, path: str) -> Iterator[BinaryIO]:
        with self._fs.open(self._at(path), "rb", cache_type="none") as stream:
            yield stream

    @contextmanager
    def write(self, path: str) -> Iterator[BinaryIO]:
        self._fs.makedirs(self._fs._parent(self._at(path)), exist_ok=True)
        stream = self._fs.open(self._at(path), "wb")
        try:
            yield stream
            stream.close()
        except BaseException:
            with suppress(Exception):  # the store may be away; it keeps, and bills, the parts that arrived
                stream.discard()
            with suppress(AttributeError):  # an fsspec file would upload the rest when it is collected
                stream.closed = True
            raise

    def publish(self, path: str, body: bytes) -> None:
        self._fs.pipe_file(self._at(path), body)

    def remove_file(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def remove(self, folder: str, first: str) -> None:
        self.remove_file(f"{folder}/{first}")
        with suppress(FileNotFoundError):
            storage.remove_tree(f"{self.url}/{folder}")

    def _entries(self, path: str) -> list[dict[str, object]]:
        self._fs.invalidate_cache()
        try:
            return [entry for entry in self._fs.ls(path, detail=True) if entry["name"].rstrip("/") != path]
        except FileNotFoundError:
            return []

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


def _name(entry: dict[str, object]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _open_file(path: str, flags: int) -> int:
    """Opens a file, without following a link at the end of the path and without blocking on a pipe."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_a_file(path) from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _not_a_file(path)
        check_opened(os.readlink(f"/proc/self/fd/{handle}"), path)  # a folder above it may be a link
    except BaseException:
        os.close(handle)
        raise
    return handle


def _not_a_file(path: str) -> CheckpointError:
    return CheckpointError(f"{path} is a link or a device, not a file.", hint="Replace it with the file itself.")
