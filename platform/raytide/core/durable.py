"""Small JSON files that are either whole or absent, whoever is killed while writing them."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600) -> None:
    """Replace the file at once: readers see the old or the new text, never a part."""
    os.replace(_staged(path, data, mode), path)


def create_json(path: Path, data: Mapping[str, object], *, mode: int = 0o600) -> bool:
    """Write the file unless it exists. Of several writers one gets True, and its text stays."""
    staged = _staged(path, data, mode)
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    finally:
        staged.unlink()
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


def _staged(path: Path, data: Mapping[str, object], mode: int) -> Path:
    """The text, flushed to disk beside its final place."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "w") as file:
        json.dump(data, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(fd)
    return staged
