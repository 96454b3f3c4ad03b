"""New stores in a few milliseconds: copies of one that was migrated once, instead of all migrations for each test."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from raytide.core.state import Store

NAME = "state.db"


@functools.cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Store.open(f"sqlite:///{folder}/{NAME}").close()
        assert sorted(path.name for path in Path(folder).iterdir()) == [NAME, f"{NAME}.lock"]  # no WAL is left
        return (Path(folder) / NAME).read_bytes()


def new_store(folder: Path | str) -> Store:
    """Returns the store in a folder's `state.db`, which is empty at first."""
    path = Path(folder) / NAME
    if not path.exists():
        path.write_bytes(_migrated())
    return Store.open(f"sqlite:///{path}")
