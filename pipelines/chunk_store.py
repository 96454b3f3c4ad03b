"""Stores the finished chunks of a build beside its output, so that a build that was killed continues from them.

A chunk's name is a hash of everything that decides its bytes. So any gang may continue a build, and a build with a
changed spec reuses the chunks that the change does not affect. A worker that can reach the folder writes its results
itself. The driver writes the results of all other workers. Only one build at a time claims `out`, so only one driver
uses the folder.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raytide.core.errors import ClusterError, DataError, StorageError
from raytide.core.io.storage import exists, join, open_url, read_bytes, remove_tree, write_bytes
from raytide.pipelines.readers.base import InputPart

PARTIAL = ".partial"
MARK = "mark"
CHECKSUM_BYTES = 16


class AlteredError(ClusterError):
    """Raised when a stored result has changed. Either a power failure damaged the result, or someone altered it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the partial result {name} was altered.", hint="Build again: it will be made anew.")
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        return AlteredError, (self.name,)


@dataclass(frozen=True, slots=True)
class Delivery:
    """The results of a task. `blobs` maps names to results. Each result is stored under its name. If large results are
    stored already, they are left out.
    """

    blobs: dict[str, bytes]
    is_stored: bool


@dataclass(frozen=True, slots=True)
class ChunkStore:
    """The folder that holds the finished chunks of a build."""

    folder: str
    token: str
    """The content of the folder's marker file, by which a worker tells this folder from another one at the same path.
    """

    @classmethod
    def create(cls, out: str, token: str) -> ChunkStore:
        store = cls(join(out, PARTIAL), token)
        write_bytes(join(store.folder, MARK), token.encode(), is_durable=False)
        return store

    def is_visible(self) -> bool:
        """Returns whether this process can reach the folder that the driver created."""
        return _is_visible(self)

    def names(self) -> set[str]:
        """Returns the names of all stored results."""
        fs, path = open_url(self.folder)
        fs.invalidate_cache()
        found = (name.rsplit("/", 1)[-1] for name in fs.ls(path, detail=False))
        return {name for name in found if name != MARK and not name.endswith(".part")}

    def put(self, blobs: Mapping[str, bytes]) -> None:
        """Writes results in the given order. If the last result exists, all of them exist."""
        for name, body in blobs.items():
            write_bytes(join(self.folder, name), body, is_durable=False)

    def get(self, name: str) -> bytes:
        return read_bytes(join(self.folder, name))

    def remove(self, names: Iterable[str]) -> None:
        fs, path = open_url(self.folder)
        for name in names:
            if fs.exists(join(path, name)):
                fs.rm_file(join(path, name))

    def hand_over(self, blobs: Mapping[str, bytes], small: frozenset[str]) -> Delivery:
        """Stores a worker's results and returns what the worker sends to the driver.

        If the worker can reach the folder, it sends only results whose kind is in `small`. Otherwise it sends all
        results.
        """
        if not self.is_visible():
            return Delivery(dict(blobs), is_stored=False)
        self.put(blobs)
        return Delivery({name: body for name, body in blobs.items() if name.partition("-")[0] in small}, is_stored=True)


@lru_cache(maxsize=8)
def _is_visible(store: ChunkStore) -> bool:
    try:
        return read_bytes(join(store.folder, MARK)) == store.token.encode()
    except (DataError, StorageError, OSError):
        return False


def remove_partial(out: str) -> None:
    """Removes all finished chunks of the build that writes to `out`."""
    if exists(join(out, PARTIAL)):
        remove_tree(join(out, PARTIAL))


def chunk_key(identity: object, parts: Iterable[InputPart], extra: bytes = b"") -> str:
    """Returns a hash of a chunk's parts, and of `identity` and `extra`, which describe how the parts are processed."""
    listed = [(part.url, part.size, part.version, part.reader, part.span) for part in parts]
    body = json.dumps([identity, listed], sort_keys=True).encode()
    return hashlib.sha256(body + b"\0" + extra).hexdigest()[:40]


def has_versions(parts: Iterable[InputPart]) -> bool:
    """Returns whether every file has a version (an ETag or a modification time) by which a change can be noticed."""
    return all(part.version for part in parts)


def pack_blob(arrays: Mapping[str, np.ndarray], about: Mapping[str, object]) -> bytes:
    """Packs arrays and a JSON object into bytes, with a checksum."""
    columns = [[name, array.dtype.str, array.nbytes] for name, array in arrays.items()]
    head = json.dumps({"arrays": columns, "about": about}).encode()
    parts: list[bytes | memoryview] = [len(head).to_bytes(8, "little"), head, *map(bytes_of, arrays.values())]
    return b"".join([_checksum(*parts), *parts])


def _checksum(*parts: bytes | memoryview) -> bytes:
    """Returns the CRC-32 of the concatenated parts, in CHECKSUM_BYTES."""
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found.to_bytes(CHECKSUM_BYTES, "little")


def bytes_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array. A contiguous array is not copied."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def unpack_blob(blob: bytes, name: str) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Returns the arrays and the JSON object that `pack_blob` packed. Raises AlteredError if the bytes have changed
    since.
    """
    view = memoryview(blob)
    stated, body = bytes(view[:CHECKSUM_BYTES]), view[CHECKSUM_BYTES:]
    # Signatures of datasets that earlier releases built begin with a SHA-256.
    if len(body) < 8 or (stated != _checksum(body) and stated != hashlib.sha256(body).digest()[:CHECKSUM_BYTES]):
        raise AlteredError(name)
    start = CHECKSUM_BYTES + 8 + int.from_bytes(body[:8], "little")
    head = json.loads(bytes(view[CHECKSUM_BYTES + 8 : start]))
    arrays = {}
    for column, dtype, size in head["arrays"]:
        arrays[column] = np.frombuffer(view[start : start + size], np.dtype(dtype))
        start += size
    return arrays, head["about"]
