"""Small JSON files that are written atomically. If the writer is killed, the file has either the old text or the new
text."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_STAGED = re.compile(r"\..+\.(\d+)\.[0-9a-f]{8}\.part")
_LEFT_BEHIND_S = 60.0
"""The age at which a staged file counts as left behind if its writer is not found."""


def write_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600, is_kept: bool = True) -> None:
    """Writes `data` as JSON to the file. The file is replaced atomically.

    If `is_kept` is True, the new text survives a power loss once this function has returned. If `is_kept` is False,
    the file may have the old text or be empty after a power loss. If the function raises OSError, the file keeps the
    old text, and no temporary file is left.
    """
    write_text(path, _json(data), mode=mode, is_kept=is_kept)


def write_text(path: Path, text: str, *, mode: int = 0o600, is_kept: bool = True) -> None:
    """Replaces the file atomically by a text. `mode`, `is_kept` and errors are as in `write_json`."""
    staged = _staged(path, text, mode, is_kept=is_kept)
    try:
        os.replace(staged, path)
    except BaseException:
        _discard(staged)
        raise
    if is_kept:
        sync(path.parent)


def create_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600) -> bool:
    """Writes the file if it does not exist yet. Returns True if this call wrote the file. If several writers call this
    concurrently, exactly one of them gets True.
    """
    staged = _staged(path, _json(data), mode, is_kept=True)
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    finally:
        _discard(staged)
    sync(path.parent)
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the JSON mapping in the file, or None if the file does not exist. Raises ValueError if the file does not
    contain a mapping."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if not isinstance(data, dict):
        raise ValueError(f"{path} has no mapping at the top level")
    return data


def check_room(folder: Path, size: int = 4096) -> None:
    """Raises OSError if a file of `size` bytes cannot be written to the folder now. The check writes a temporary file
    and removes it.
    """
    staged = folder / f".room.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        _write(staged, b"\0" * size, 0o600, is_kept=True)
    finally:
        _discard(staged)


def sweep(folders: Iterable[Path]) -> int:
    """Removes temporary files from these folders. Such files are left when a process is killed while it writes. Returns
    the number of removed files.
    """
    removed = 0
    for folder in folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                found = _STAGED.fullmatch(entry.name)
                if found is not None and _is_left_behind(Path(entry.path), int(found[1])):
                    _discard(Path(entry.path))
                    removed += 1
    return removed


def _is_left_behind(staged: Path, pid: int) -> bool:
    """Returns whether the writer is dead and the file is old. The age counts because the pid may belong to another
    container.
    """
    try:
        return not Path("/proc", str(pid)).exists() and abs(time.time() - staged.stat().st_mtime) > _LEFT_BEHIND_S
    except FileNotFoundError:
        return False


def _json(data: Mapping[str, object]) -> str:
    return json.dumps(data, indent=1, sort_keys=True)


def _staged(path: Path, text: str, mode: int, *, is_kept: bool) -> Path:
    """Writes the text to a staged file beside its final path, and returns that file; leaves no file on an error."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        _write(staged, text.encode(), mode, is_kept=is_kept)
    except BaseException:
        _discard(staged)
        raise
    return staged


def _write(path: Path, data: bytes, mode: int, *, is_kept: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        if is_kept:
            os.fsync(fd)


def sync(path: Path) -> None:
    """Flushes a file's content, or the names in a folder, to the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _discard(staged: Path) -> None:
    with suppress(OSError):
        staged.unlink()
