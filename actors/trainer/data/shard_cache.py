"""Fetches remote shards, as steps need them, into this user's cache folder. When the cache is full, the least recently
used shards are deleted.

A shard is hashed while it arrives. It gets its final name only if it is whole, so that a file with a final name can be
read at once. The processes of a machine share the folder. One process fetches a shard, and the others wait for it. A
shard that is evicted while a process reads it stays readable for that process. A shard that is evicted before it is
opened is fetched again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raytide.core.errors import ConfigError, DataError
from raytide.core.io.private_folder import lock, private_folder, require_free_space
from raytide.core.io.storage import full_disk_is_an_error, join, open_url
from raytide.core.io.token_dataset import ITEM_BYTES, Shard, TokenManifest

CHUNK_BYTES = 4 << 20
THREADS = 4
"""The number of shards that are fetched at once."""
ATTEMPTS = 5
"""The most fetches of one shard, if other processes evict it each time before it is opened."""


class ShardCache:
    """The shards of one remote dataset. `read_shard` may be called from any thread."""

    def __init__(self, url: str, manifest: TokenManifest, digest: str, budget_bytes: int) -> None:
        self._url, self._dtype, self._budget_bytes = url, manifest.dtype, budget_bytes
        self._shards = [shard for shard in manifest.shards if shard.tokens]
        largest = max((self._bytes(shard) for shard in self._shards), default=0)
        if largest > budget_bytes:
            raise ConfigError(
                f"stream.cache_gb {budget_bytes / 1e9:g} is less than a shard of {url}: {largest / 1e9:.3f} GB.",
                hint="Raise stream.cache_gb, or build the dataset with smaller shards.",
            )
        self._folder, self._prefix = private_folder("shards"), digest[:32]
        self._coming: dict[int, Future[None]] = {}
        self._guard = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="data shards")
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)

    def read_shard(self, index: int) -> npt.NDArray[np.unsignedinteger]:
        """Returns the tokens of a shard. Raises DataError if the shard is missing or differs from the manifest. Also
        raises DataError if the shard is fetched several times, but evicted each time before it can be opened.
        """
        with self._guard:
            coming = self._coming.pop(index, None)
        if coming is not None:
            coming.result()
        file = self._file(index)
        for _ in range(ATTEMPTS):
            self._fetch(index)
            with suppress(FileNotFoundError):  # evicted by another process: fetch it again
                os.utime(file)
                return np.memmap(file, dtype=np.dtype(self._dtype).newbyteorder("<"), mode="r")
        raise DataError(
            f"{self._shards[index].file} of {self._url} is evicted from {self._folder} as soon as it is fetched.",
            hint="Raise stream.cache_gb: the runs on this machine share it.",
        )

    def prefetch(self, indices: Iterable[int]) -> None:
        """Starts to fetch the given shards, except those in the cache. `read_shard` raises the errors later."""
        for index in indices:
            with self._guard:
                if index not in self._coming and not self._file(index).exists():
                    self._coming[index] = self._threads.submit(self._fetch, index)

    def _file(self, index: int) -> Path:
        return self._folder / f"{self._prefix}-{index:06d}.bin"

    def _bytes(self, shard: Shard) -> int:
        return shard.tokens * ITEM_BYTES[self._dtype]

    def _fetch(self, index: int) -> None:
        file = self._file(index)
        if file.exists():
            return
        with lock(file.with_suffix(".lock")):
            if not file.exists():
                part = file.with_suffix(".part")
                try:
                    self._make_room(self._bytes(self._shards[index]))
                    self._copy(self._shards[index], part)
                    os.replace(part, file)
                finally:
                    part.unlink(missing_ok=True)

    def _copy(self, shard: Shard, part: Path) -> None:
        """Copies a shard into the cache. Raises DataError unless its content is what the manifest names."""
        fs, path = open_url(join(self._url, shard.file))
        digest, size = hashlib.sha256(), 0
        require_free_space(self._folder, self._bytes(shard), f"{shard.file} of {self._url}")
        with full_disk_is_an_error(str(part)):
            try:
                source = fs.open(path, "rb")
            except FileNotFoundError:
                raise DataError(f"{shard.file} of {self._url} is missing.", hint="Build the dataset again.") from None
            with source, open(part, "wb") as copy:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
                    copy.write(chunk)
        if size != self._bytes(shard) or digest.hexdigest() != shard.sha256:
            raise DataError(
                f"{shard.file} of {self._url} was altered: it has {size} bytes and the SHA-256 {digest.hexdigest()}, "
                f"and the manifest says {self._bytes(shard)} bytes and {shard.sha256}.",
                hint="Build the dataset again, or copy it again from where it was built.",
            )

    def _make_room(self, needed: int) -> None:
        """Deletes shards, the least recently used first, until `needed` more bytes fit into the budget."""
        with lock(self._folder / "evict.lock"):
            found = []
            for file in self._folder.glob("*.bin"):
                with suppress(FileNotFoundError):
                    about = file.stat()
                    found.append((about.st_mtime_ns, about.st_size, file))
            used = sum(size for _, size, _ in found)
            for _, size, file in sorted(found):
                if used + needed <= self._budget_bytes:
                    return
                file.unlink(missing_ok=True)
                used -= size
