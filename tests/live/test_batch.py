"""`raytide batch` on the session's cluster: its process is killed at half, and the job goes on there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import raytide as rt
from raytide.core.objects.job import JobState

pytestmark = pytest.mark.cluster

ROWS = 1000
MODULE = ["-m", "raytide.actors.serving.batch"]


def test_a_job_goes_on_where_its_process_was_killed(
    tide: rt.Client, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    body = {"model": "any", "prompt": "go", "max_tokens": 8}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    source.write_text("".join(json.dumps({**line, "custom_id": f"id-{place}"}) + "\n" for place in range(ROWS)))
    engine = {"kind": "fake", "tokens_per_s": 40.0, "max_running": 32}
    run = tide.batch(source, out, model=str(tmp_path), engine=engine, cpus=1)
    progress = tmp_path / "out.jsonl.progress" / "rows.jsonl"
    eventually(lambda: progress.exists() and progress.read_bytes().count(b"\n") > 1)
    running = [process for process in psutil.process_iter() if _is_of(process, out)]  # long before half
    eventually(lambda: progress.read_bytes().count(b"\n") > ROWS // 2, every_s=0.01)
    for process in running:
        process.kill()
    for process in running:
        process.wait(60)
    recorded = [json.loads(line)["line"] for line in progress.read_bytes().rpartition(b"\n")[0].splitlines()[1:]]
    assert ROWS // 2 <= len(recorded) < ROWS
    run.wait(timeout_s=360.0)
    assert run.state is JobState.SUCCEEDED, run.why()
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [f"id-{place}" for place in range(ROWS)]
    by_id = {each["custom_id"]: each for each in answers}
    assert all(by_id[each["custom_id"]] == each for each in recorded), "a recorded row has run once"
    spec = run.view.job.spec
    assert (spec.priority, spec.is_preemptible) == ("low", True)


def _is_of(process: psutil.Process, out: Path) -> bool:
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return False
    return arguments[1:3] == MODULE and str(out) in arguments
