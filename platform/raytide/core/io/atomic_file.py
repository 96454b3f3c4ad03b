"""Small JSON files that are either whole or absent, whoever is killed while writing them."""

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
"""The age at which a staged file of a writer that cannot be found is taken for a leftover."""


def write_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600, is_kept: bool = True) -> None:
    """Replace the file at once: readers see the old or the new text, never a part.

    When this returns, the new text outlives a loss of power, unless not `is_kept`: then the machine may come back with
    the old text, or with an empty file. OSError leaves the old text, and nothing beside it.
    """
    staged = _staged(path, data, mode, is_kept=is_kept)
    try:
        os.replace(staged, path)
    except BaseException:
        _discard(staged)
        raise
    if is_kept:
        _sync_folder(path.parent)


def create_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600) -> bool:
    """Write the file unless it exists. Of several writers one gets True, and its text stays."""
    staged = _staged(path, data, mode, is_kept=True)
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    finally:
        _discard(staged)
    _sync_folder(path.parent)
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """The file's mapping, or None when there is no such file. ValueError when it holds no mapping."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no mapping at its top")
    return data


def check_room(folder: Path, size: int = 4096) -> None:
    """Raise OSError when a file of this many bytes cannot be written there now; nothing of it stays."""
    staged = folder / f".room.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        _write(staged, b"\0" * size, 0o600, is_kept=True)
    finally:
        _discard(staged)


def sweep(folders: Iterable[Path]) -> int:
    """Remove what writers that were killed half-way left in these folders; returns how many files that were."""
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
    """A pid may be another container's, hence the age too."""
    try:
        return not Path("/proc", str(pid)).exists() and abs(time.time() - staged.stat().st_mtime) > _LEFT_BEHIND_S
    except FileNotFoundError:
        return False


def _staged(path: Path, data: Mapping[str, object], mode: int, *, is_kept: bool) -> Path:
    """The text beside its final place; nothing is left there when it cannot be written."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    text = json.dumps(data, indent=1, sort_keys=True)
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


def _sync_folder(folder: Path) -> None:
    """A file's name is on disk once its folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _discard(staged: Path) -> None:
    with suppress(OSError):
        staged.unlink()
