"""The job of `raytide batch`: `python -m raytide.actors.serving.batch INPUT OUT SPEC`. SPEC is a ServeSpec as JSON.

The job runs the rows on an engine of its own and records progress in the folder `OUT.progress`. After a preemption
or a crash, the job continues from the recorded progress, on any node that reads the same storage. Before a
preemption, the job gets a SIGTERM. It then starts no more rows, but finishes the rows that are running and records
their results.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

from raytide.actors.engine.base import Engine
from raytide.actors.models.model_cache import staged_model
from raytide.actors.serving.batch.input_file import BatchInput, InputRow, check_input
from raytide.actors.serving.batch.progress_file import ProgressFile, RowResult
from raytide.actors.serving.batch.row_request import request_row
from raytide.actors.serving.batch.run import run_rows, write_results
from raytide.actors.serving.engines import build_engine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server
from raytide.core.errors import DataError, EngineDeadError, RaytideError
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.io.claim import Claim, committing
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.objects.endpoint import ServeSpec

_ROWS_AT_ONCE = 128
_SHOWN_ERRORS = 5
_SAY_EVERY_S = 10.0
_CHECK_EVERY_S = 5.0
_CANCEL_S = 10.0
"""The seconds within which cancelled rows must end. An engine that hangs does not let them."""
_DONE = "done.json"
_TERMINATED = 128 + signal.SIGTERM


def run_batch_job(
    source: Path, out: Path, spec: ServeSpec, *, holder: str = "", say: Callable[[str], object] = print
) -> None:
    """Runs the rows of the file `source`. Writes the answers to `out` and failed rows to `out.errors`, both in the
    order of the input.

    The model is the one in `spec`, whatever model the rows name. `holder` is the job's id. Raises DataError if a
    line of the input is wrong or the recorded progress belongs to another batch. Raises ConflictError while another
    process runs this batch. Raises EngineDeadError if the engine dies or hangs; the unfinished rows then have no
    result yet. Raises SystemExit if a SIGTERM has stopped the batch before its last row.
    """
    if not source.is_file():
        raise DataError(f"{source} does not exist here.", hint="Name a file on storage that all nodes read.")
    rows = check_input(source, None)
    if rows.errors:
        shown = "; ".join(f"line {each.line}: {each.message}" for each in rows.errors[:_SHOWN_ERRORS])
        raise DataError(f"{source} cannot be run: {shown}", hint="Correct these lines.")
    folder = out.with_name(f"{out.name}.progress")
    with full_disk_is_an_error(str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
    claim = Claim([str(folder)], holder)
    try:
        header = {"input": rows.digest, "model": spec.model, **({"weights": spec.weights} if spec.weights else {})}
        done = read_json(folder / _DONE)
        if done is not None and done != header:
            raise DataError(f"{out} is the output of another batch.", hint=f"Name another output, or remove {folder}.")
        if done is None:
            _run(rows, out, folder, spec, header, claim, say)
        say(f"{out} has the answers to {len(rows)} rows")
    finally:
        claim.release()


def _run(
    rows: BatchInput,
    out: Path,
    folder: Path,
    spec: ServeSpec,
    header: Mapping[str, object],
    claim: Claim,
    say: Callable[[str], object],
) -> None:
    path = folder / "rows.jsonl"
    progress = ProgressFile(path, header)
    try:
        if len(progress):
            say(f"{len(progress)} of {len(rows)} rows have run before")
        if len(progress) < len(rows):
            staged = staged_model(spec.model)
            swapped = staged_model(spec.weights) if spec.weights else None
            engine, weights = build_engine(spec, staged.path), None if swapped is None else swapped.path
            asyncio.run(_answer(rows, progress, engine, weights, claim, say))
            for each in filter(None, (staged, swapped)):
                each.close()
        if len(progress) < len(rows):
            say(f"stopped: {len(progress)} of {len(rows)} rows have run, and the next attempt goes on there")
            raise SystemExit(_TERMINATED)
        results = folder / "output", folder / "errors"
        write_results(progress, len(rows), *results)
        with committing([str(folder)], claim.token), full_disk_is_an_error(str(out)):
            for result, place in zip(results, (out, out.with_name(f"{out.name}.errors")), strict=True):
                if result.stat().st_size or place == out:
                    os.replace(result, place)
                else:
                    result.unlink()
            write_json(folder / _DONE, header)
            path.unlink()
    finally:
        progress.close()
    usage = progress.usage
    say(f"{progress.completed} rows answered, {progress.failed} failed; {usage.output_tokens} tokens generated")


async def _answer(
    rows: BatchInput,
    progress: ProgressFile,
    engine: Engine,
    weights: str | None,
    claim: Claim,
    say: Callable[[str], object],
) -> None:
    server = Server(engine, model="batch")
    app = create_app(server, owns_server=False)
    said_s, began = time.monotonic(), len(progress)

    async def request(place: int, row: InputRow) -> RowResult:
        nonlocal said_s
        claim.check()
        if time.monotonic() - said_s > _SAY_EVERY_S:
            rate = (len(progress) - began) / (time.monotonic() - began_s)
            say(f"{len(progress)} of {len(rows)} rows, {rate:.1f} a second")
            said_s = time.monotonic()
        result = await request_row(app, place, InputRow(row.custom_id, row.url, {**row.body, "model": "batch"}), dict)
        if not result.is_ok:
            await _check(server)  # a failure of the engine is not the row's: the row has no result yet
        return result

    stopping = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await server.start()
    tasks: list[asyncio.Task[None]] = []
    try:
        if weights is not None:
            await engine.load_weights(weights)
        began_s = time.monotonic()
        work = run_rows(rows, progress, request, at_once=_ROWS_AT_ONCE, is_stopping=stopping.is_set)
        running, watching = tasks = [asyncio.create_task(work), asyncio.create_task(_watch(server))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await (running if running.done() else watching)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_S)
        await server.stop()


async def _watch(server: Server) -> None:
    """Raises EngineDeadError once the engine is dead or hangs."""
    while True:
        await asyncio.sleep(_CHECK_EVERY_S)
        await _check(server)


async def _check(server: Server) -> None:
    if (problem := await server.problem()) is not None:
        hint = "The next attempt goes on with the rows that have no result."
        raise EngineDeadError(f"{problem.rstrip('.')}.", hint=hint)


def main(source: str, out: str, spec: str) -> None:
    try:
        parsed = ServeSpec.parse(json.loads(spec), where="batch")
        run_batch_job(Path(source), Path(out), parsed, holder=os.environ.get("TORCHELASTIC_RUN_ID", uuid4().hex))
    except RaytideError as error:
        raise SystemExit(f"raytide batch: {error}") from None


if __name__ == "__main__":
    main(*sys.argv[1:])
