"""The job of `raytide batch`, in processes that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from raytide.actors.engine import FakeEngine, GenChunk, GenRequest
from raytide.actors.serving.batch import __main__ as batch_job
from raytide.actors.serving.batch.__main__ import run_batch_job
from raytide.actors.serving.openai_api.server import Server
from raytide.core.errors import DataError, EngineDeadError
from raytide.core.objects.endpoint import ServeSpec

ROOT = Path(__file__).parents[4]
SPEC = ServeSpec(name="batch", model="unused", engine={"kind": "fake", "tokens_per_s": 20.0, "max_running": 32})
ROWS = 1000


def write_rows(path: Path, count: int = ROWS, **change: object) -> Path:
    path.write_text("".join(json.dumps(row(place) | change) + "\n" for place in range(count)))
    return path


def row(place: int) -> dict[str, object]:
    chat = {"model": "any", "messages": [{"role": "user", "content": f"row {place}"}], "max_tokens": 4}
    return {"custom_id": f"id-{place}", "method": "POST", "url": "/v1/chat/completions", "body": chat}


def start(source: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "raytide.actors.serving.batch", str(source), str(out), SPEC.model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "TORCHELASTIC_RUN_ID": "job-1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_job_that_is_killed_at_half_goes_on_there(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    progress = tmp_path / "out.jsonl.progress" / "rows.jsonl"
    first, deadline_s = start(source, out), time.monotonic() + 240
    while not (progress.exists() and progress.read_bytes().count(b"\n") > ROWS // 2):
        assert first.poll() is None and time.monotonic() < deadline_s, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=240)
    recorded = [json.loads(line)["line"] for line in progress.read_bytes().rpartition(b"\n")[0].splitlines()[1:]]
    assert ROWS // 2 <= len(recorded) < ROWS and not out.exists()
    second = start(source, out)
    said, _ = second.communicate(timeout=240)
    assert second.returncode == 0, said
    assert f"{len(recorded)} of {ROWS} rows have run before" in said
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [f"id-{place}" for place in range(ROWS)]
    by_id = {each["custom_id"]: each for each in answers}
    assert all(by_id[each["custom_id"]] == each for each in recorded), "a recorded row has run once"
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "tide"
    assert not progress.exists() and not out.with_name("out.jsonl.errors").exists()
    third = start(source, out)
    said, _ = third.communicate(timeout=240)
    assert third.returncode == 0 and said == f"{out} has the answers to {ROWS} rows\n"


def test_a_job_that_is_told_to_end_records_the_rows_in_flight(tmp_path: Path) -> None:
    """Rows begin in their order, so those that have run are the first ones, without a gap."""
    source, out = write_rows(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl"
    progress = tmp_path / "out.jsonl.progress" / "rows.jsonl"
    first, deadline_s = start(source, out), time.monotonic() + 240
    while not (progress.exists() and progress.read_bytes().count(b"\n") > ROWS // 4):
        assert first.poll() is None and time.monotonic() < deadline_s, first.communicate()
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    said, _ = first.communicate(timeout=240)
    places = [json.loads(line)["place"] for line in progress.read_bytes().splitlines()[1:]]
    assert first.returncode == 128 + signal.SIGTERM
    assert f"stopped: {len(places)} of {ROWS} rows have run" in said
    assert ROWS // 4 <= len(places) < ROWS and sorted(places) == list(range(len(places)))
    second = start(source, out)
    said, _ = second.communicate(timeout=240)
    assert second.returncode == 0, said
    assert f"{len(places)} of {ROWS} rows have run before" in said
    assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == [f"id-{n}" for n in range(ROWS)]


def test_rows_that_fail_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    wrong = row(1) | {"body": {"model": "x", "messages": []}}
    source.write_text("".join(json.dumps(each) + "\n" for each in (row(0), wrong, row(2))))
    said: list[str] = []
    run_batch_job(source, out, SPEC, say=said.append)
    assert "2 rows answered, 1 failed; 8 tokens generated" in said
    assert [json.loads(line)["custom_id"] for line in out.read_text().splitlines()] == ["id-0", "id-2"]
    (failed,) = map(json.loads, out.with_name("out.jsonl.errors").read_text().splitlines())
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("id-1", 400)


def test_a_wrong_input_and_the_output_of_another_batch_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="line 1: method is not POST"):
        run_batch_job(write_rows(tmp_path / "wrong", 1, method="GET"), out, SPEC)
    with pytest.raises(DataError, match="does not exist"):
        run_batch_job(tmp_path / "absent", out, SPEC)
    run_batch_job(write_rows(tmp_path / "rows", 2), out, SPEC)
    before = out.read_text()
    with pytest.raises(DataError, match="another batch"):
        run_batch_job(write_rows(tmp_path / "others", 3), out, SPEC)
    assert out.read_text() == before


def test_rows_that_a_dead_engine_left_run_in_the_next_attempt(tmp_path: Path) -> None:
    source, out = write_rows(tmp_path / "rows.jsonl", 200), tmp_path / "out.jsonl"
    dying = SPEC.model_copy(update={"engine": {"kind": "fake", "max_running": 8, "die_on": "row 100"}})
    with pytest.raises(EngineDeadError, match="engine batch has died"):
        run_batch_job(source, out, dying)
    progress = (tmp_path / "out.jsonl.progress" / "rows.jsonl").read_bytes()
    recorded = [json.loads(line)["line"] for line in progress.splitlines()[1:]]
    assert len(recorded) < 200 and all(each["response"]["status_code"] == 200 for each in recorded)
    said: list[str] = []
    run_batch_job(source, out, SPEC, say=said.append)
    assert said[-2].startswith("200 rows answered, 0 failed")


def test_an_engine_that_hangs_ends_the_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeEngine):
        async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:
            try:
                await asyncio.Event().wait()
                yield GenChunk(request.request_id, [], "")
            finally:  # the engine does not abort it, either
                await asyncio.Event().wait()

    async def stalled(server: Server) -> str:
        return "the engine took no step"

    monkeypatch.setattr(batch_job, "build_engine", lambda *_: Hanging())
    monkeypatch.setattr(batch_job, "_CHECK_EVERY_S", 0.0)
    monkeypatch.setattr(batch_job, "_CANCEL_S", 0.0)
    monkeypatch.setattr(Server, "problem", stalled)
    with pytest.raises(EngineDeadError, match="took no step"):
        run_batch_job(write_rows(tmp_path / "rows.jsonl", 2), tmp_path / "out.jsonl", SPEC)


def test_the_weights_of_the_spec_are_loaded_and_make_another_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    async def load_weights(self: FakeEngine, source: str, version: str | None = None) -> str:
        loaded.append(source)
        return source

    monkeypatch.setattr(FakeEngine, "load_weights", load_weights)
    (tmp_path / "new").mkdir()
    source, out = write_rows(tmp_path / "rows", 2), tmp_path / "out.jsonl"
    run_batch_job(source, out, SPEC.model_copy(update={"weights": str(tmp_path / "new")}))
    assert loaded == [str(tmp_path / "new")]
    with pytest.raises(DataError, match="another batch"):
        run_batch_job(source, out, SPEC)


def test_weights_that_cannot_be_loaded_end_the_job_and_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[Server] = []
    stop = Server.stop

    async def load_weights(self: FakeEngine, source: str, version: str | None = None) -> str:
        raise DataError("the weights are of another architecture.")

    async def noted(self: Server) -> None:
        stopped.append(self)
        await stop(self)

    monkeypatch.setattr(FakeEngine, "load_weights", load_weights)
    monkeypatch.setattr(Server, "stop", noted)
    (tmp_path / "new").mkdir()
    with pytest.raises(DataError, match="another architecture"):
        run_batch_job(
            write_rows(tmp_path / "rows", 2),
            tmp_path / "out.jsonl",
            SPEC.model_copy(update={"weights": str(tmp_path / "new")}),
        )
    assert len(stopped) == 1
