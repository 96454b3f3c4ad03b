"""Verifies a dataset's shards, once per machine and user. All processes and runs share the result.

Every byte is hashed (measured: 0.67 s/GB on one core), and the largest token id is found (0.05 s/GB). The result is
cached under the file's name, size, times and inode, so that a changed file is hashed again. The processes of a machine
share the work: a process takes a shard that no other process is hashing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raytide.core.errors import DataError, RaytideError, StorageError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.io.private_folder import private_folder, try_lock
from raytide.core.io.token_dataset import Shard, TokenDtype

WAIT_S = 60.0
"""The seconds for which opening a dataset waits for the hashes. A larger dataset is hashed during training, which fails
at the next step once a bad shard is found.
"""
CHUNK_BYTES = 4 << 20
_POLL_S = 0.05
_REBUILD = "Build the dataset again, or copy it again from where it was built."


@dataclass(frozen=True, slots=True)
class _Result:
    sha256: str
    largest: int


class ShardCheck:
    """Hashes shards on a background thread. `wait` and `check` raise the DataError of a bad shard."""

    def __init__(self, name: str, folder: Path, shards: Sequence[Shard], dtype: TokenDtype, vocab_size: int) -> None:
        self.name, self.folder, self.dtype, self.vocab_size = (
            name,
            folder,
            np.dtype(dtype).newbyteorder("<"),
            vocab_size,
        )
        self._shards = [shard for shard in shards if shard.tokens]
        self._results = private_folder("checked")
        self._error: RaytideError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shard check", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float = WAIT_S) -> bool:
        """Waits up to `timeout_s` and returns whether all shards are verified. Raises DataError for a bad shard."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        self.check()
        return self._thread is not None and not self._thread.is_alive()

    def check(self) -> None:
        """Raises the error of a bad shard, if one has been found."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stops hashing. Returns at once, without waiting for the thread."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._check_all()
        except RaytideError as error:
            self._error = error
        except Exception as error:  # raised by `check`, where the training can stop for it
            self._error = StorageError(f"cannot read {self.name}: {error}.", hint="Check the path and its disk.")

    def _check_all(self) -> None:
        todo = list(self._shards)
        while todo and not self._stop.is_set():
            busy = [shard for shard in todo if not self._check_shard(shard)]
            if busy == todo:  # other processes are hashing all of them
                self._stop.wait(_POLL_S)
            todo = busy

    def _check_shard(self, shard: Shard) -> bool:
        """Verifies one shard. Returns False if another process is hashing it at present."""
        path = self.folder / shard.file
        cache_file = self._results / f"{_key(path, self.dtype.name)}.json"
        found = _read_result(cache_file)
        if found is None:
            with try_lock(cache_file.with_suffix(".lock")) as is_held:
                if not is_held:
                    return False
                found = _read_result(cache_file) or self._hash(path)
                if found is None:
                    return True
                with suppress(RaytideError, OSError):  # on a full disk, the next process hashes it again
                    write_json(cache_file, {"sha256": found.sha256, "largest": found.largest}, is_kept=False)
            with suppress(OSError):
                cache_file.with_suffix(".lock").unlink()
        self._raise_if_bad(shard, found)
        return True

    def _hash(self, path: Path) -> _Result | None:
        """Returns the shard's hash and largest token id; None if `close` was called meanwhile."""
        digest, largest = hashlib.sha256(), 0
        with open(path, "rb", buffering=0) as file:
            buffer = bytearray(CHUNK_BYTES)
            view, ids = memoryview(buffer), np.frombuffer(buffer, self.dtype)
            while size := _fill(file, view):
                if self._stop.is_set():
                    return None
                digest.update(view[:size])
                count = size // self.dtype.itemsize
                largest = max(largest, int(ids[:count].max(initial=0)))
        return _Result(digest.hexdigest(), largest)

    def _raise_if_bad(self, shard: Shard, found: _Result) -> None:
        if found.sha256 != shard.sha256:
            raise DataError(
                f"{shard.file} of {self.name} was altered: its SHA-256 is {found.sha256}, and the manifest "
                f"says {shard.sha256}.",
                hint=_REBUILD,
            )
        if found.largest >= self.vocab_size:
            raise DataError(
                f"{shard.file} of {self.name} holds the id {found.largest}, outside its vocabulary of "
                f"{self.vocab_size}.",
                hint="Build the dataset again with the tokenizer that it is trained with.",
            )


def _fill(file: object, view: memoryview) -> int:
    """Reads a file into `view` until that is full or the file ends: a short read must not cut an id in two."""
    size = 0
    while size < len(view) and (got := file.readinto(view[size:])):  # type: ignore[attr-defined]
        size += got
    return size


def _key(path: Path, dtype: str) -> str:
    """Returns the cache key. It includes ctime, which, unlike mtime, cannot be set by hand."""
    about = path.stat()
    identity = (
        str(path.resolve()),
        about.st_dev,
        about.st_ino,
        about.st_size,
        about.st_mtime_ns,
        about.st_ctime_ns,
        dtype,
    )
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:32]


def _read_result(cache_file: Path) -> _Result | None:
    try:
        body = read_json(cache_file)
        return None if body is None else _Result(str(body["sha256"]), int(body["largest"]))
    except (ValueError, KeyError, TypeError, OSError):
        return None
