"""Files by fsspec URL (`s3://bucket/x`, `memory://x`, a plain path), with atomic writes."""

from __future__ import annotations

import errno
import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from raytide.core.errors import DataError, RaytideError, StorageError
from raytide.core.io.atomic_file import sync
from raytide.core.io.private_paths import check_path

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def open_url(url: str) -> tuple[AbstractFileSystem, str]:
    """Returns the file system of a URL, and the path in that file system. Raises DeniedError for private paths, and
    DataError if fsspec cannot open the URL.

    `::` chains file systems, as in `simplecache::file:///x`. In a local path, or in a URL of an object store, `::` is
    part of a name, as in the manual page `IO::Socket.3pm`.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    from raytide.core.io.guarded_files import GuardedFiles

    if is_local(url):
        path = str(LocalFileSystem._strip_protocol(url))
        check_path(path, url)
        return GuardedFiles(), path
    for part in url.split("::"):  # `simplecache::file:///x` is a file too
        if is_local(part) or part.startswith("local:"):
            check_path(str(LocalFileSystem._strip_protocol(part)), url)

    try:
        protocol = url.partition("://")[0]
        if "::" in url and protocol in REMOTE:
            store = fsspec.get_filesystem_class(protocol)
            fs, path = fsspec.filesystem(protocol, **store._get_kwargs_from_urls(url)), store._strip_protocol(url)
        else:
            fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"cannot open {url}: {error}.", hint="Use a path or a URL of an installed fsspec protocol."
        ) from None
    if type(fs) is LocalFileSystem:
        fs = GuardedFiles(**fs.storage_options)
    return fs, str(path)


def read_bytes(url: str) -> bytes:
    fs, path = open_url(url)
    try:
        with cloud_failures(url):
            return bytes(fs.cat_file(path))
    except FileNotFoundError:
        raise DataError(f"{url} does not exist.", hint="Check the path.") from None


def write_bytes(url: str, data: bytes, *, is_durable: bool = True) -> None:
    """Writes the file at `url` atomically: a local file is first written beside it, an object store shows whole objects
    only. If `is_durable` is false, the file may be empty or incomplete after a power failure.
    """
    write_parts(url, [data], is_durable=is_durable)


def write_parts(url: str, parts: Sequence[bytes | memoryview], *, is_durable: bool = True) -> None:
    """Writes the parts one after another to one file. The file is written atomically, as by `write_bytes`. For a local
    file, the parts are not joined in memory.
    """
    fs, path = open_url(url)
    parent = fs._parent(path)
    part = f"{path}.{uuid.uuid4().hex}.part"
    with full_disk_is_an_error(url), cloud_failures(url):
        fs.makedirs(parent, exist_ok=True)
        if url.partition("://")[0] in _ATOMIC:  # `mv` would copy it, and takes brackets for a pattern
            fs.pipe_file(path, b"".join(parts))
            return
        try:
            if is_local(url):
                with fs.open(part, "wb") as file:
                    for each in parts:
                        file.write(each)
                if is_durable:
                    sync(Path(part))
                os.replace(part, path)
            else:
                fs.pipe_file(part, b"".join(parts))
                fs.mv(part, path)
        except BaseException:
            if fs.exists(part):
                fs.rm_file(part)
            raise


def join(url: str, *parts: str) -> str:
    return "/".join([url.rstrip("/"), *parts])


def exists(url: str) -> bool:
    fs, path = open_url(url)
    with cloud_failures(url):
        return bool(fs.exists(path))


def remove_tree(url: str) -> None:
    """Removes a folder and all files below it. Raises FileNotFoundError if there is no such folder.

    fsspec's `rm` takes brackets, `*` and `?` in a path for a pattern, and would remove what matches instead.
    """
    fs, path = open_url(url)
    if is_local(url) or not any(char in path for char in "*?["):
        fs.rm(path, recursive=True)
        return
    fs.invalidate_cache()
    found = fs.find(path, withdirs=True, detail=True)
    if not found:
        raise FileNotFoundError(url)
    folders = {name for name, info in found.items() if info["type"] == "directory"}
    for name in found.keys() - folders:
        fs.rm_file(name)
    for name in sorted({*folders, path}, reverse=True):
        with suppress(OSError):  # most object stores have no folders
            fs.rmdir(name)


LOCAL = frozenset({"file", "local"})
REMOTE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hf"})
"""The protocols that specs may use: object stores whose address and credentials come from the operator, not the URL."""
_ATOMIC = REMOTE | {"memory"}
_CLIENTS = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "huggingface_hub"})
"""The packages of clients of object stores, some of whose errors are no OSErrors."""
_AZURE_HOSTS = (".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net", ".fabric.microsoft.com")


def check_url(url: str) -> None:
    """Raises DataError unless the URL is a local path or a plain URL of an object store.

    Rejects http URLs, chained URLs (`simplecache::http://...`), URLs with credentials, a port or a host, and URLs
    with options in the query. Such a URL could make a reader open something else.
    """
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    if "::" in url or url.lower().startswith("data:"):
        why = "is a chained or inline URL"
    elif not separator or scheme in LOCAL:
        return
    elif scheme not in REMOTE:
        why = f"uses the protocol {scheme[:20]}, which is not supported"
    else:
        container, _, host = rest.partition("/")[0].rpartition("@")
        is_azure = scheme in ("abfs", "abfss", "az") and host.lower().endswith(_AZURE_HOSTS)
        if ":" in container + host or (container and not is_azure):
            why = "names credentials, a port or a host"
        elif "?" in rest and "=" in rest.partition("?")[2]:
            why = "has options in its query"
        else:
            return
    names = ", ".join(f"{name}://" for name in sorted(REMOTE))
    raise DataError(f"{url[:200]} {why}.", hint=f"Use a path, or a plain URL of an object store ({names}).")


def local_path(url: str) -> str | None:
    """Returns the path of a local URL, or None for any other URL."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return os.path.expanduser(url)
    return rest if scheme.lower() in LOCAL else None


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def sha256(*parts: bytes | memoryview) -> str:
    """Returns the SHA-256 of the concatenated parts, in hex."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


class FullDiskError(StorageError):
    """Raised when a disk is full or a quota is exhausted. The error has a class of its own, because an error loses its
    cause when it is passed to another process.
    """


@contextmanager
def full_disk_is_an_error(what: str) -> Iterator[None]:
    """Turns an OSError inside the block into a StorageError. `what` names the written file in the message."""
    try:
        yield
    except OSError as error:
        if is_full_disk(error):
            raise FullDiskError(
                f"no space left while writing {what}.",
                hint="Free space there, then resume: earlier files are complete.",
            ) from error
        raise StorageError(f"cannot write {what}: {error}.", hint="Check the path and its permissions.") from error


@contextmanager
def cloud_failures(what: str) -> Iterator[None]:
    """Converts those errors of a cloud's client that are no OSErrors to StorageErrors that name `what`. Examples are a
    missing connection and missing credentials.
    """
    try:
        yield
    except Exception as error:
        is_client = any(each.__module__.partition(".")[0] in _CLIENTS for each in type(error).__mro__)
        if isinstance(error, OSError | ValueError) or not is_client:
            raise
        raise _unreachable(what, error) from error


@contextmanager
def named_failures(what: str) -> Iterator[None]:
    """Converts a filesystem's errors to StorageErrors that name `what` and can be sent to other processes.
    FileNotFoundError is not converted.
    """
    try:
        yield
    except (RaytideError, FileNotFoundError):
        raise
    except Exception as error:  # cloud clients have their own exceptions
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            with full_disk_is_an_error(what):
                raise
        raise _unreachable(what, error) from error


def _unreachable(what: str, error: Exception) -> StorageError:
    return StorageError(
        f"cannot reach {what}: {type(error).__name__}: {error}.", hint="Check the path, its permissions and the disk."
    )


def is_full_disk(error: BaseException) -> bool:
    """Returns whether the error was caused by a full disk or an exhausted quota. The error may come from another
    process.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (OSError, FullDiskError)):
        cause = cause.__cause__
    return isinstance(cause, FullDiskError) or (cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT))
