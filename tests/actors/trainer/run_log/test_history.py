"""A run's files read back, also while it runs and after deaths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytide.actors.trainer.run_log import history
from raytide.core.errors import DataError


def line(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss}


def test_a_step_done_twice_counts_once_and_half_a_line_not_at_all(tmp_path: Path) -> None:
    steps = [line(1, 2.0), line(2, 3.0), line(1, 1.5), line(2, 1.0)]
    for name, lines in (("metrics", steps), ("events", [{"event": "ready"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + '{"step": 3')
    run = history.read(str(tmp_path))
    assert [(each["step"], each["loss"]) for each in run.steps] == [(1, 1.5), (2, 1.0)]
    assert run.events == [{"event": "ready"}]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no run in .*nowhere"):
        history.read(str(tmp_path / "nowhere"))
