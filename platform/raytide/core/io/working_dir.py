"""Packs a working directory into one file when a job is submitted, and unpacks it on every member of the gang.

The same files always give the same digest.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from raytide.core.errors import DataError, StorageError
from raytide.core.io.storage import is_full_disk

MOST_BYTES = 200 * 2**20
"""The compressed size of a package."""
MOST_FILE_BYTES = 50 * 2**20
MOST_UNPACKED_BYTES = 4 * 2**30
MOST_ENTRIES = 100_000
LEFT_OUT = (
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    "*.pyc",
)
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(folder: Path, exclude: tuple[str, ...] = ()) -> bytes:
    """Returns the folder as a zip file. Files and folders that match a pattern in `exclude` or `LEFT_OUT` are left out.
    A pattern matches a name, or a path relative to `folder`.

    Raises DataError if a file cannot be read, if a file or the package is too large, or if there are too many files.
    """
    if not folder.is_dir():
        raise DataError(f"the working directory {folder} is not a directory.", hint="Check --working-dir.")
    left_out = (*LEFT_OUT, *(pattern.removeprefix("./").rstrip("/") for pattern in exclude))
    buffer, size = io.BytesIO(), 0
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in _below(folder, folder, left_out, frozenset()):
            name = path.relative_to(folder).as_posix()
            with _named(path, name):
                size += _add(archive, path, name)
            _check_unpacked(f"the working directory {folder}", len(archive.filelist), size)
            if buffer.tell() > MOST_BYTES:
                raise DataError(
                    f"the working directory {folder} is too large: more than {_mb(MOST_BYTES)} when compressed.",
                    hint="Leave files out with --exclude, or use a smaller --working-dir.",
                )
    return buffer.getvalue()


def unpack(package: bytes, folder: Path) -> None:
    """Unpacks a package below `folder`. Executable files stay executable.

    Raises DataError for a package that `pack` would not make, because users may upload anything.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            entries = archive.infolist()
            sizes = [entry.file_size for entry in entries]  # zipfile reads no more than the declared sizes
            _check_unpacked("the package", len(entries), sum(sizes), max(sizes, default=0))
            for entry in entries:
                if entry.compress_type not in _PACKED:  # other methods may allocate memory as the file demands
                    raise ValueError(f"{entry.filename[:100]!r} uses an unsupported compression method")
                path = Path(archive.extract(entry, folder))
                if mode := entry.external_attr >> 16 & 0o777:
                    path.chmod(mode | (0o700 if entry.is_dir() else 0o600))
    except OSError as error:
        if is_full_disk(error):
            raise StorageError(
                f"no space left while unpacking into {folder}.", hint="Free space on that node, or upload less."
            ) from error
        raise _broken(error.strerror) from None  # a name that is too long, or both a file and a folder
    except (zipfile.BadZipFile, zlib.error, ArithmeticError, LookupError, RuntimeError, EOFError, ValueError) as error:
        raise _broken(error) from None


def _check_unpacked(what: str, entries: int, size: int, largest: int = 0) -> None:
    """Raises DataError for a package that no member of a gang would unpack."""
    if entries > MOST_ENTRIES or size > MOST_UNPACKED_BYTES or largest > MOST_FILE_BYTES:
        raise DataError(
            f"{what} has {entries} files with {_mb(size)}; limits: {MOST_ENTRIES} files, "
            f"{_mb(MOST_UNPACKED_BYTES)} in total and {_mb(MOST_FILE_BYTES)} each.",
            hint="Leave files out with --exclude, and read them from shared storage.",
        )


def _broken(why: object) -> DataError:
    return DataError(f"the package is broken: {why}.", hint="Submit the script again, which uploads a new package.")


def digest_of(package: bytes) -> str:
    return hashlib.sha256(package).hexdigest()


def _below(place: Path, folder: Path, left_out: tuple[str, ...], above: frozenset[str]) -> Iterator[Path]:
    """Yields files and empty folders. Links are followed unless they form a circle."""
    above |= {os.path.realpath(place)}
    with _named(place, place.relative_to(folder).as_posix()):
        kept = [path for path in sorted(place.iterdir()) if not _is_left_out(path, folder, left_out)]
        inside = [(path, path.is_file(), path.is_dir()) for path in kept]
    if not inside and place != folder:
        yield place
    for path, is_file, is_folder in inside:
        if is_file:
            yield path
        elif is_folder and os.path.realpath(path) not in above:
            yield from _below(path, folder, left_out, above)


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> int:
    """Adds a file or an empty folder, and returns its size in bytes."""
    if path.is_dir():
        archive.writestr(zipfile.ZipInfo(f"{name}/", _EPOCH), b"")
        return 0
    stat = path.stat()
    if stat.st_size > MOST_FILE_BYTES:
        raise DataError(
            f"{path} has {_mb(stat.st_size)}; files of a working directory may have at most {_mb(MOST_FILE_BYTES)}.",
            hint=f"Leave it out (`--exclude '{name}'`) and read it from shared storage, or name a smaller "
            "--working-dir.",
        )
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = (stat.st_mode & 0o777) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content := path.read_bytes())
    return len(content)


@contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """Turns an OSError on reading `path` inside the block into a DataError that names the path."""
    try:
        yield
    except OSError as error:
        why = error.strerror
    except UnicodeEncodeError:
        why = "its name is not valid UTF-8"
    else:
        return
    raise DataError(
        f"{_printable(str(path))} cannot be read: {why}.", hint=f"Leave it out: `--exclude '{_printable(name)}'`."
    )


def _printable(name: str) -> str:
    """Returns the name with `?` in place of bytes that are not UTF-8. As a pattern, the result matches the name."""
    return name.encode(errors="replace").decode()


def _is_left_out(path: Path, folder: Path, left_out: tuple[str, ...]) -> bool:
    below = path.relative_to(folder).as_posix()
    return any(fnmatch(path.name, pattern) or fnmatch(below, pattern) for pattern in left_out)


def _mb(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
