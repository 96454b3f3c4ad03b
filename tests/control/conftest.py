"""An empty store and a provider that sold nothing, and stand-ins for the controller and the API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores import new_store

from raytide.core.state import Store

STANDINS = Path(__file__).parent / "standins"


@pytest.fixture
def standin_path(monkeypatch: pytest.MonkeyPatch) -> str:
    """PYTHONPATH on which `python -m standin_child` and `python -m standin_api` are found."""
    path = os.pathsep.join([str(STANDINS), str(Path(__file__).parents[2] / "platform")])
    monkeypatch.setenv("PYTHONPATH", path)
    return path


class NoMachines:
    """A provider that never bought anything."""

    def machines(self) -> tuple[object, ...]:
        return ()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = new_store(tmp_path)
    yield opened
    opened.close()
