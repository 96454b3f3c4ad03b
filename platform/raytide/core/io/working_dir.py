"""A working directory as one file: packed where a job is submitted, unpacked on every member that runs it.

The same files give the same digest, whenever they are packed.
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
"""Of a package, compressed."""
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
    """The folder as a zip file. `exclude`: patterns of names, or of paths below the folder, beside `LEFT_OUT`.

    DataError when a file cannot be read, or when it, or all of it, is too large to travel with a job.
    """
    if not folder.is_dir():
        raise DataError(f"the working directory {folder} is no directory.", hint="Check --working-dir.")
    left_out = (*LEFT_OUT, *(pattern.removeprefix("./").rstrip("/") for pattern in exclude))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in _below(folder, folder, left_out, frozenset()):
            name = path.relative_to(folder).as_posix()
            with _named(path, name):
                _add(archive, path, name)
            if buffer.tell() > MOST_BYTES:
                raise DataError(
                    f"the working directory {folder} is too large: more than {_mb(MOST_BYTES)} when compressed.",
                    hint="Leave files out with --exclude, or name a smaller --working-dir.",
                )
    return buffer.getvalue()


def unpack(package: bytes, folder: Path) -> None:
    """Write the files below `folder`; those that could be run there can be run here.

    DataError for what `pack` would not have made: whoever may upload may have made it otherwise.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            entries = archive.infolist()
            sizes = [entry.file_size for entry in entries]  # what an archive declares is the most that is read of it
            if (
                len(entries) > MOST_ENTRIES
                or sum(sizes) > MOST_UNPACKED_BYTES
                or max(sizes, default=0) > MOST_FILE_BYTES
            ):
                raise DataError(
                    f"the package has {len(entries)} files with {_mb(sum(sizes))} in all; {MOST_ENTRIES} with "
                    f"{_mb(MOST_UNPACKED_BYTES)}, and {_mb(MOST_FILE_BYTES)} each, are the most.",
                    hint="Leave files out with --exclude, and read them from shared storage.",
                )
            for entry in entries:
                if entry.compress_type not in _PACKED:  # others ask for memory in proportion to a number in the file
                    raise ValueError(f"{entry.filename[:100]!r} is packed in another way than packages are")
                path = Path(archive.extract(entry, folder))
                if mode := entry.external_attr >> 16 & 0o777:
                    path.chmod(mode | (0o700 if entry.is_dir() else 0o600))
    except OSError as error:
        if is_full_disk(error):
            raise StorageError(
                f"no space left while unpacking into {folder}.", hint="Free space on that node, or send less."
            ) from error
        raise _broken(error.strerror) from None  # a name that is too long, or a file's and a folder's at once
    except (zipfile.BadZipFile, zlib.error, ArithmeticError, LookupError, RuntimeError, EOFError, ValueError) as error:
        raise _broken(error) from None


def _broken(why: object) -> DataError:
    return DataError(f"the package is broken: {why}.", hint="Submit the script anew: it is uploaded again.")


def digest_of(package: bytes) -> str:
    return hashlib.sha256(package).hexdigest()


def _below(place: Path, folder: Path, left_out: tuple[str, ...], above: frozenset[str]) -> Iterator[Path]:
    """Files, and directories that have nothing in them. Links are followed, but not back to where they are."""
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


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    if path.is_dir():
        archive.writestr(zipfile.ZipInfo(f"{name}/", _EPOCH), b"")
        return
    stat = path.stat()
    if stat.st_size > MOST_FILE_BYTES:
        raise DataError(
            f"{path} has {_mb(stat.st_size)}; a file of a working directory may have {_mb(MOST_FILE_BYTES)}.",
            hint=f"Leave it out (`--exclude '{name}'`) and read it from shared storage, or name a smaller "
            "--working-dir.",
        )
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = (stat.st_mode & 0o777) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, path.read_bytes())


@contextmanager
def _named(path: Path, name: str) -> Iterator[None]:
    """What cannot travel is said with its name."""
    try:
        yield
    except OSError as error:
        why = error.strerror
    except UnicodeEncodeError:
        why = "its name is no UTF-8"
    else:
        return
    raise DataError(
        f"{_printable(str(path))} cannot be read: {why}.", hint=f"Leave it out: `--exclude '{_printable(name)}'`."
    )


def _printable(name: str) -> str:
    """What is no UTF-8 in it as `?`, which is also a pattern that matches it."""
    return name.encode(errors="replace").decode()


def _is_left_out(path: Path, folder: Path, left_out: tuple[str, ...]) -> bool:
    below = path.relative_to(folder).as_posix()
    return any(fnmatch(path.name, pattern) or fnmatch(below, pattern) for pattern in left_out)


def _mb(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
