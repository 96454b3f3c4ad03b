"""What a run wrote down so far, read back: its steps, its events and how it ended. Also while it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from raytide.actors.trainer.types import RunResult
from raytide.core.errors import DataError
from raytide.core.io.storage import exists, join, read_bytes

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunHistory:
    steps: list[Line]
    """One line for each step in order; of a step that was done again after a death, the last."""
    events: list[Line]


def read(out: str) -> RunHistory:
    """The history of the run whose `out` this is, a directory or an fsspec URL."""
    if not exists(out):
        raise DataError(f"there is no run in {out}.", hint="Name a run's `out`, on a machine that reaches it.")
    by_step = {line["step"]: line for line in _lines(join(out, "metrics.jsonl"))}
    return RunHistory([by_step[step] for step in sorted(by_step)], _lines(join(out, "events.jsonl")))


def result(out: str) -> RunResult:
    """How the run ended."""
    body = json.loads(read_bytes(join(out, "run.json")))
    return RunResult(**{field.name: body[field.name] for field in fields(RunResult)})


def _lines(url: str) -> list[Line]:
    """Its whole lines: the last may be half written."""
    if not exists(url):
        return []
    body = read_bytes(url)
    return [json.loads(line) for line in body[: body.rfind(b"\n") + 1].splitlines()]
