"""Stand-ins for the controller and the API, so that the cluster is tested without them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STANDINS = Path(__file__).parent / "standins"


@pytest.fixture
def standin_path(monkeypatch: pytest.MonkeyPatch) -> str:
    """PYTHONPATH on which `python -m standin_child` and `python -m standin_api` are found."""
    path = os.pathsep.join([str(STANDINS), str(Path(__file__).parents[2] / "platform")])
    monkeypatch.setenv("PYTHONPATH", path)
    return path
