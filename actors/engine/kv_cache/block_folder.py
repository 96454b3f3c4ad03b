"""The files of the KV cache on local disk, one for each block. A file's name is a hash of the block's tokens and all
tokens before them.

A file is written under a temporary name and then renamed. Its length and checksum are verified when it is read, so a
file that a crash damaged is never used. A folder belongs to one engine at a time. Another engine of the same model gets
its own folder.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import struct
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from raytide.actors.engine.kv_cache.handle import Bytes
from raytide.core.errors import ConfigError

_log = logging.getLogger(__name__)

_MAGIC = b"raytide-block-1\n"
_HEADER = struct.Struct("<16s16sQQ")  # magic, key, bytes of content, checksum
_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = "unfinished"
_MOST_ENGINES = 64


@dataclass(slots=True)
class _Unused:
    """The folder of an engine that has ended. No running engine uses it: it is for other weights or options, or there
    were more replicas then.
    """

    name: str
    bytes: int
    used_s: float


class BlockFolder:
    """The block files of one engine under the directory `root`, in order of last use.

    A block's bytes depend on the block's key, and on the model and options that `identity` stands for. `limit_bytes`
    is the maximum total size of this folder and of the unused folders under `root`. A folder is unused if its engine
    had already ended when this object was made. One thread may write while another reads.

    Raises ConfigError if `limit_bytes` is less than a block, if `root` is not a folder, if other users can write to
    `root` or use the engine's folder, or if 64 engines use `root` already. Raises OSError if the disk fails.
    """

    def __init__(self, root: Path, identity: str, block_bytes: int, limit_bytes: int) -> None:
        self.file_bytes = _HEADER.size + block_bytes
        if limit_bytes < self.file_bytes:
            raise ConfigError(
                f"max_local_disk_size is {limit_bytes} bytes, and a KV block takes {self.file_bytes}.",
                hint="Give it more, or leave local_disk out.",
            )
        self._root, self._block_bytes, self._limit = root, block_bytes, limit_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, None] = OrderedDict()  # next to be evicted first
        self.evictions, self.damaged = 0, 0
        _make_private(root)
        self._root_handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._root_handle)
        _check_root(root, os.fstat(self._root_handle))
        self.name, self._handle = self._own_folder(identity)
        weakref.finalize(self, os.close, self._handle)
        self._unused = self._find_unused()
        self._index()
        self._make_room(0)

    @property
    def path(self) -> Path:
        return self._root / self.name

    @property
    def num_bytes(self) -> int:
        """The size of this folder's files in bytes."""
        return len(self._blocks) * self.file_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def touch(self, key: bytes) -> None:
        """Marks a block as the most recently used one."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def write(self, key: bytes, parts: Items[Bytes]) -> None:
        """Stores a block with the content of the joined `parts`. Raises OSError when the disk is full or fails."""
        if key in self._blocks:
            return
        self._make_room(self.file_bytes)
        content = b"".join(part.data for part in parts)
        assert len(content) == self._block_bytes
        self._store(key.hex(), key, content)
        with self._lock:
            self._blocks[key] = None

    def read(self, key: bytes) -> Bytes | None:
        """Returns a block's content, or None if the block is not there. Removes a file that is damaged or holds another
        block, and returns None.
        """
        if key not in self._blocks:
            return None
        found = self._load(key.hex(), key)
        if found is not None:
            self.touch(key)
        elif key in self._blocks:  # not evicted meanwhile
            self.damaged += 1
            self.forget(key)
        return found

    def forget(self, key: bytes) -> None:
        """Removes a block and its file."""
        with self._lock:
            if key not in self._blocks:
                return
            del self._blocks[key]
        self._remove(key.hex())

    def release(self) -> None:
        """Unlocks the folder for other engines. Files that tasks are still writing stay intact."""
        fcntl.flock(self._handle, fcntl.LOCK_UN)

    def seconds_per_byte(self) -> float:
        """Measures how many seconds it takes to read a byte from the disk. The test files are first flushed and, if the
        system allows it, dropped from the operating system's cache, so that they are not read from memory.
        """
        count = max(1, min(8, (32 << 20) // self.file_bytes))
        content = os.urandom(self._block_bytes)
        names = [f"{_UNFINISHED}-probe-{index}" for index in range(count)]
        key = bytes(16)
        try:
            for name in names:
                self._store(name, key, content, flushed=True)
            began = perf_counter()
            for name in names:
                self._load(name, key)
            return (perf_counter() - began) / (count * self.file_bytes)
        finally:
            for name in names:
                self._remove(name)

    def _own_folder(self, identity: str) -> tuple[str, int]:
        """Returns the name and locked handle of the first folder with this identity that no running engine holds;
        creates one if needed.
        """
        for number in range(_MOST_ENGINES):
            name = f"{identity}.{number}"
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._root_handle)
            handle = self._open_folder(name)
            if handle is None:
                raise ConfigError(
                    f"{self._root / name} belongs to another user, or others may use it: its KV is not to be trusted.",
                    hint="Remove it, or name another folder as local_disk.",
                )
            if _locks(handle):
                return name, handle
            os.close(handle)
        raise ConfigError(f"{_MOST_ENGINES} engines use {self._root} already.", hint="Name another local_disk.")

    def _open_folder(self, name: str) -> int | None:
        """Returns a handle of a folder that only this user can access; None for any other."""
        try:
            handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._root_handle)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EACCES):
                return None
            raise
        if _is_private(os.fstat(handle)):
            return handle
        os.close(handle)
        return None

    def _find_unused(self) -> list[_Unused]:
        """Returns the folders of ended engines, least recently used first."""
        found = list[_Unused]()
        for name in os.listdir(self._root_handle):
            handle = None if name == self.name or not name.startswith("kv-") else self._open_folder(name)
            if handle is None:
                continue
            try:
                if not _locks(handle):
                    continue
                with os.scandir(handle) as entries:
                    files = [entry.stat(follow_symlinks=False) for entry in entries]
                used_s = max((file.st_mtime for file in files), default=0.0)
                found.append(_Unused(name, sum(file.st_size for file in files), used_s))
            finally:
                os.close(handle)
        return sorted(found, key=lambda each: each.used_s)

    def _index(self) -> None:
        """Registers the files that an earlier engine left, in order of last use, and removes its unfinished ones."""
        foreign, found = 0, list[tuple[float, bytes]]()
        with os.scandir(self._handle) as entries:
            for entry in entries:
                file = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(file.st_mode) or not _is_private(file):
                    foreign += 1
                elif _NAME.fullmatch(entry.name) and file.st_size == self.file_bytes:
                    found.append((file.st_mtime, bytes.fromhex(entry.name)))
                else:
                    self._remove(entry.name)
        if foreign:
            _log.warning("%d files in %s belong to another user or mode and are not used", foreign, self.path)
        self._blocks.update((key, None) for _, key in sorted(found))

    def _make_room(self, needed: int) -> None:
        """Removes folders of ended engines, then this engine's blocks, least recently used first, until `needed` more
        bytes fit.
        """
        while self._unused and self.num_bytes + sum(each.bytes for each in self._unused) + needed > self._limit:
            self._remove_unused(self._unused.pop(0).name)
        while True:
            with self._lock:  # never held while the disk works: the engine's thread asks for blocks
                if not self._blocks or self.num_bytes + needed <= self._limit:
                    return
                key, _ = self._blocks.popitem(last=False)
            self._remove(key.hex())
            self.evictions += 1

    def _remove_unused(self, name: str) -> None:
        handle = self._open_folder(name)
        if handle is None:
            return
        try:
            if not _locks(handle):  # an engine has come back to it
                return
            with os.scandir(handle) as entries:
                for entry in entries:
                    os.unlink(entry.name, dir_fd=handle)
            os.rmdir(name, dir_fd=self._root_handle)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", self._root / name, error)
        finally:
            os.close(handle)

    def _store(self, name: str, key: bytes, content: bytes, *, flushed: bool = False) -> None:
        unfinished = f"{_UNFINISHED}-{name}"
        header = _HEADER.pack(_MAGIC, key, len(content), zlib.crc32(content, zlib.crc32(key)))
        self._remove(unfinished)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(unfinished, flags, 0o600, dir_fd=self._handle), "wb", buffering=0) as file:
                for part in (memoryview(header), memoryview(content)):
                    while part:
                        part = part[file.write(part) :]
                if flushed:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.rename(unfinished, name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        except BaseException:
            self._remove(unfinished)
            raise

    def _load(self, name: str, key: bytes) -> Bytes | None:
        try:
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._handle)
        except OSError:
            return None
        with os.fdopen(handle, "rb", buffering=0) as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or not _is_private(found) or found.st_size != self.file_bytes:
                return None
            data = np.empty(self.file_bytes, np.uint8)
            rest = data.data
            try:
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
                os.utime(handle)
            except OSError:
                return None
        content = data[_HEADER.size :]
        right = (_MAGIC, key, self._block_bytes, zlib.crc32(content.data, zlib.crc32(key)))
        return content if not rest and _HEADER.unpack(data[: _HEADER.size].tobytes()) == right else None

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            os.unlink(name, dir_fd=self._handle)


def _make_private(root: Path) -> None:
    try:
        root.mkdir(0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"local_disk {root} is not a folder.", hint="Name a folder on a local disk.") from None


def _check_root(root: Path, found: os.stat_result) -> None:
    """Raises ConfigError if another user could replace folders in `root`."""
    is_open = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.geteuid(), 0) or is_open:
        raise ConfigError(
            f"local_disk {root} belongs to another user, or others may write to it.",
            hint="Name a folder of your own with mode 0700.",
        )


def _is_private(found: os.stat_result) -> bool:
    """Returns whether a file or folder belongs to this user, and nobody else may read or write it."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _locks(handle: int) -> bool:
    """Locks a folder for as long as the handle is open; returns False if another engine holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
