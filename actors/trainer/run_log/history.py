"""Reads a run's steps, events and result from its files. Steps and events can be read while the run continues."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from raytide.actors.trainer.types import RunResult
from raytide.core.errors import DataError
from raytide.core.io.storage import exists, join, open_url, read_bytes

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunHistory:
    steps: list[Line]
    """One line per logged step in order; for a repeated step, the last."""
    events: list[Line]


def read(out: str) -> RunHistory:
    """Returns the steps and events of the run in `out`, a directory or an fsspec URL."""
    open_url(out)[0].invalidate_cache()
    if not exists(out):
        raise DataError(f"there is no run in {out}.", hint="Give the `out` of a run, on a machine that can read it.")
    by_step = {line["step"]: line for line in _lines(join(out, "metrics.jsonl"))}
    return RunHistory([by_step[step] for step in sorted(by_step)], _lines(join(out, "events.jsonl")))


def result(out: str) -> RunResult:
    """Returns the result of a run that has ended."""
    body = json.loads(read_bytes(join(out, "run.json")))
    return RunResult(**{field.name: body[field.name] for field in fields(RunResult)})


def _lines(url: str) -> list[Line]:
    """Returns the file's complete lines, parsed. A half-written last line is left out."""
    fs, path = open_url(url)
    try:
        body = bytes(fs.cat_file(path))
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in body[: body.rfind(b"\n") + 1].splitlines()]
