"""Computes the digest of a model directory. The digest does not depend on the directory's location."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from raytide.core.errors import DataError
from raytide.core.io.storage import is_local, named_failures, open_url

_CHUNK_BYTES = 1 << 20
_THREADS = 4
"""The number of files that are read at once. Hashing and reading release the GIL."""


@dataclass(frozen=True, slots=True)
class ContentDigest:
    """The digest, the number of files and the total size of a directory."""

    sha256: str
    files: int
    bytes: int


def digest_of_directory(url: str, *, with_links: bool = True) -> ContentDigest:
    """Returns the digest of a model directory.

    It is the SHA-256 of a JSON list with one entry [relative path, size in bytes, SHA-256] for each file, sorted by
    path. A link to a file counts as the file, as in the snapshots of Hugging Face's cache. Files and folders whose
    names begin with a dot are ignored. Raises DataError if the directory is not a model, or if the content of a file
    does not have the listed size. Raises StorageError if a file or a folder cannot be read. Without `with_links`, links
    are left out, as in the digests of earlier releases.
    """
    with named_failures(url):
        return _digest_of_directory(url, with_links)


def digest_to_compare(url: str, sha256: str) -> ContentDigest:
    """Returns a model directory's digest: the one without its links if that one is `sha256`."""
    try:
        found = digest_of_directory(url)
    except DataError:
        if (earlier := _earlier_digest(url, sha256)) is None:
            raise
        return earlier
    return found if found.sha256 == sha256 else _earlier_digest(url, sha256) or found


def _earlier_digest(url: str, sha256: str) -> ContentDigest | None:
    """Returns the digest without links if it is `sha256`, else None."""
    if is_local(url):
        with suppress(DataError):  # config.json may be a link itself
            found = digest_of_directory(url, with_links=False)
            return found if found.sha256 == sha256 else None
    return None


def _digest_of_directory(url: str, with_links: bool) -> ContentDigest:
    fs, root = open_url(url)
    prefix = root.rstrip("/") + "/"
    fs.invalidate_cache()  # this process may have listed the folder before
    try:
        if is_local(url):
            found = dict(_local_sizes(root, with_links))
        else:
            listed = fs.find(root, detail=True).items()
            # A path that ends with a slash is the empty object that consoles of object stores make for a folder.
            files = (each for each in listed if each[1]["type"] == "file" and not each[0].endswith("/"))
            found = {path: info["size"] for path, info in files}
    except (FileNotFoundError, NotADirectoryError):
        found = {}
    names = {path.removeprefix(prefix): path for path in found}
    names = {name: path for name, path in names.items() if not any(part[:1] == "." for part in name.split("/"))}
    if not names.keys() & {"config.json", "adapter_config.json"}:
        raise DataError(f"{url} is not a model directory: it has no config.json.", hint="Use an exported model.")

    def digest(path: str) -> tuple[int, str]:
        total, size = hashlib.sha256(), 0
        try:
            with fs.open(path, "rb") as file:
                for chunk in _chunks(file):
                    total.update(chunk)
                    size += len(chunk)
        except FileNotFoundError:
            size = -1
        if size != found[path]:
            raise DataError(f"{path} changed while it was read.", hint="Register a model that is complete.")
        return size, total.hexdigest()

    ordered = sorted(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(digest, (names[name] for name in ordered)))
    rows = [[name, size, sha256] for name, (size, sha256) in zip(ordered, digests, strict=True)]
    total_bytes = sum(size for size, _ in digests)
    return ContentDigest(hashlib.sha256(json.dumps(rows).encode()).hexdigest(), len(rows), total_bytes)


def _local_sizes(root: str, with_links: bool) -> Iterator[tuple[str, int]]:
    """Yields the path and the size of each file below a local folder. Raises OSError if a folder cannot be read;
    fsspec's `find` would leave out such folders, and links.
    """

    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name[:1] != "."]
        for name in names:
            path = os.path.join(folder, name)
            if name[:1] == "." or (not with_links and os.path.islink(path)):
                continue
            try:
                info = os.stat(path)
            except FileNotFoundError:
                raise DataError(f"{path} is a link to nothing.", hint="Register a model that is complete.") from None
            if stat.S_ISREG(info.st_mode):
                yield path, info.st_size


def _chunks(file: object) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):  # type: ignore[attr-defined]  # fsspec has no types
        yield chunk
