"""Computes the digest of a model directory. The digest does not depend on the directory's location."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytide.core.errors import DataError
from raytide.core.io.storage import open_url

_CHUNK_BYTES = 1 << 20
_THREADS = 4
"""The number of files that are read at once. Hashing and reading release the GIL."""


@dataclass(frozen=True, slots=True)
class ContentDigest:
    """The digest, the number of files and the total size of a directory."""

    sha256: str
    files: int
    bytes: int


def digest_of_directory(url: str) -> ContentDigest:
    """Returns the digest of a model directory.

    It is the SHA-256 of a JSON list with one entry [relative path, size in bytes, SHA-256] for each file, sorted by
    path. Files and folders whose names begin with a dot are ignored. Raises DataError if the directory is not a
    model, or if the content of a file does not have the listed size.
    """
    fs, root = open_url(url)
    prefix = root.rstrip("/") + "/"
    fs.invalidate_cache()  # this process may have listed the folder before
    try:
        listed = fs.find(root, detail=True).items()
        # A path that ends with a slash is the empty object that consoles of object stores make for a folder.
        found = {path: info for path, info in listed if info["type"] == "file" and not path.endswith("/")}
    except FileNotFoundError:
        found = {}
    names = {path.removeprefix(prefix): path for path in found}
    names = {name: path for name, path in names.items() if not any(part[:1] == "." for part in name.split("/"))}
    if not names.keys() & {"config.json", "adapter_config.json"}:
        raise DataError(f"{url} is not a model directory: it has no config.json.", hint="Use an exported model.")

    def digest(path: str) -> tuple[int, str]:
        total, size = hashlib.sha256(), 0
        with fs.open(path, "rb") as file:
            for chunk in _chunks(file):
                total.update(chunk)
                size += len(chunk)
        if size != found[path]["size"]:
            raise DataError(f"{path} changed while it was read.", hint="Register a model that is complete.")
        return size, total.hexdigest()

    ordered = sorted(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(digest, (names[name] for name in ordered)))
    rows = [[name, size, sha256] for name, (size, sha256) in zip(ordered, digests, strict=True)]
    total_bytes = sum(size for size, _ in digests)
    return ContentDigest(hashlib.sha256(json.dumps(rows).encode()).hexdigest(), len(rows), total_bytes)


def _chunks(file: object) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):  # type: ignore[attr-defined]  # fsspec has no types
        yield chunk
