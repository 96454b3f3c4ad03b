"""Works on the batches of all teams, at a lower priority than clients' requests. One gateway process at a time works on
a batch.

The process holds the lock of its batch. The kernel frees the lock when the process dies. Any gateway process can
then continue the batch with the rows that have no result in the batch's progress file. Replicas finish the rows that
the dead process had sent to them, and give the answers to the next process that requests the same rows. A process
that is being stopped starts no more rows, and records the results of those rows in flight that end in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any, ParamSpec, TypeVar

from starlette.types import ASGIApp

from raytide.actors.serving.batch.input_file import BatchInput, InputRow, check_input
from raytide.actors.serving.batch.progress_file import ProgressFile, RowResult
from raytide.actors.serving.batch.row_request import failed_row, request_row
from raytide.actors.serving.batch.run import run_rows, write_results
from raytide.actors.serving.openai_api.admission import BatchRow
from raytide.control.supervision.daemon import hold_lock
from raytide.core.errors import ConflictError, RaytideError
from raytide.gateway.batches.objects import (
    FINAL,
    BatchErrorItem,
    BatchErrors,
    BatchObject,
    BatchStatus,
    BatchTokens,
    RequestCounts,
)
from raytide.gateway.batches.store import BatchStore, UnfinishedBatch

PRIORITY = 10
"""The priority of rows in the engines: clients' requests have 0."""
_POLL_S = 1.0
_SWEEP_S = 60.0
_RETRY_S = 5.0
_DRAIN_S = 5.0
"""The seconds that rows in flight have to end when the process stops; its supervisor kills it soon after that."""
_BATCHES_AT_ONCE = 4
"""The most batches of one process, beside the first one of each team."""
_ROWS_AT_ONCE = 32
"""The most rows of one batch that are in flight."""
_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
ScopeOf = Callable[[str, BatchRow], Mapping[str, Any]]


class BatchRunner:
    """Works on batches in one gateway process.

    `scope_of(account, row)` returns entries of the ASGI scope for the row's request, such as the caller. `account`
    is the account of the API key that created the batch.
    """

    def __init__(
        self,
        batches: BatchStore,
        app: ASGIApp,
        scope_of: ScopeOf,
        has_priority: Callable[[str], bool],
        *,
        rows_at_once: int = _ROWS_AT_ONCE,
        poll_s: float = _POLL_S,
        drain_s: float = _DRAIN_S,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`has_priority(model)` returns whether the model's engine supports priorities."""
        self._batches, self._app, self._scope_of, self._has_priority = batches, app, scope_of, has_priority
        self._rows_at_once, self._poll_s, self._drain_s, self._now_s = rows_at_once, poll_s, drain_s, now_s
        self._is_stopping = False
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Works on batches until the call is cancelled.

        After the cancellation, the rows in flight have a few seconds to finish. Another process continues the
        unfinished batches.
        """
        swept_s = 0.0
        try:
            while True:
                try:
                    if time.monotonic() - swept_s > _SWEEP_S:
                        swept_s = time.monotonic()
                        await asyncio.to_thread(self._batches.sweep)
                    await self._take_up()
                except (RaytideError, OSError) as error:
                    _log.warning("batches wait, since their files cannot be read: %s", error)
                except Exception:  # a damaged database
                    _log.exception("batches wait, since they cannot be read")
                await asyncio.sleep(self._poll_s)
        finally:
            self._is_stopping = True
            tasks = [task for _, task in self._running.values()]
            if tasks:
                await asyncio.wait(tasks, timeout=self._drain_s)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_up(self) -> None:
        """Starts batches that no process works on: those of teams with the fewest batches in this process first, and of
        these the oldest first. Beyond _BATCHES_AT_ONCE batches, only teams without a batch here get one, so that no
        team waits for batches of others, which may take a day.
        """
        self._running = {name: entry for name, entry in self._running.items() if not entry[1].done()}
        unfinished = [
            each for each in await asyncio.to_thread(self._batches.unfinished) if each.id not in self._running
        ]
        while unfinished:
            shares = Counter(team for team, _ in self._running.values())
            chosen = min(unfinished, key=lambda each: shares[each.team])
            if len(self._running) >= _BATCHES_AT_ONCE and shares[chosen.team]:
                return
            unfinished.remove(chosen)
            if (stack := self._claimed(chosen)) is not None:
                self._running[chosen.id] = chosen.team, asyncio.create_task(self._work(chosen, stack))

    def _claimed(self, batch: UnfinishedBatch) -> ExitStack | None:
        """Returns the lock of a batch; None if another process has it."""
        stack = ExitStack()
        try:
            stack.enter_context(hold_lock(self._batches.files.folder / f"{batch.id}.lock"))
        except ConflictError:
            return None
        return stack

    async def _work(self, claimed: UnfinishedBatch, lock: ExitStack) -> None:
        with lock:
            try:
                batch = await _in_thread(self._batches.get, claimed.team, claimed.id)
                if batch.status in FINAL or await self._run(batch, claimed):
                    self._remove(claimed.id)
            except (RaytideError, OSError) as error:
                _log.warning("batch %s waits, and is tried again: %s", claimed.id, error)
                await asyncio.sleep(_RETRY_S)
            except Exception:
                _log.exception("batch %s waits, and is tried again", claimed.id)
                await asyncio.sleep(_RETRY_S)

    async def _run(self, batch: BatchObject, claimed: UnfinishedBatch) -> bool:
        """Returns whether the batch has ended, rather than this process's work on it."""
        rows = await _in_thread(check_input, self._batches.input_path(batch), batch.endpoint)
        if rows.errors:
            items = [BatchErrorItem(**asdict(error)) for error in rows.errors]
            failed = batch.model_copy(update={"errors": BatchErrors(data=items)})
            await _in_thread(self._batches.move, failed, "failed")
            return True
        progress = await _in_thread(
            ProgressFile,
            self._batches.files.folder / f"{batch.id}.progress",
            {"input": rows.digest},
            free_bytes=self._batches.files.limits.free_bytes,
        )
        try:
            return await self._run_to_the_end(batch, claimed, rows, progress)
        finally:
            progress.close()

    async def _run_to_the_end(
        self, batch: BatchObject, claimed: UnfinishedBatch, rows: BatchInput, progress: ProgressFile
    ) -> bool:
        batch = batch.model_copy(update={"model": rows.model})
        batch = await _in_thread(self._batches.move, _counted(batch, rows, progress), "in_progress")
        # Rows begin in their order, so a process that was killed had begun no others of those without a result.
        begun = set(islice((place for place in range(len(rows)) if place not in progress), self._rows_at_once))

        async def request(place: int, row: InputRow) -> RowResult:
            asked = BatchRow(f"{claimed.id}-{place}-row", may_be_running=place in begun)
            scope_of = partial(self._scope_of, claimed.account, asked)
            return await request_row(self._app, place, self._behind_clients(row), scope_of)

        status = self._ending(batch)
        if status is None:
            running = asyncio.create_task(
                run_rows(rows, progress, request, at_once=self._rows_at_once, is_stopping=lambda: self._is_stopping)
            )
            try:
                while not running.done() and status is None:
                    await asyncio.wait({running}, timeout=self._poll_s)
                    batch = await _in_thread(self._batches.move, _counted(batch, rows, progress), "in_progress")
                    status = self._ending(batch)
            finally:
                running.cancel()
                await asyncio.wait({running})
            if not running.cancelled():
                running.result()
        if len(progress) == len(rows) and status != "cancelled":
            status = "completed"
        if status is None:  # this process stops
            return False
        if status == "expired":
            await _in_thread(_expire, rows, progress)
        await _in_thread(self._finish, batch, claimed.team, rows, progress, status)
        return True

    def _ending(self, batch: BatchObject) -> BatchStatus | None:
        """Returns the state in which a batch must end before all of its rows have run; None if it need not."""
        if batch.status == "cancelling":
            return "cancelled"
        return "expired" if self._now_s() >= batch.expires_at else None

    def _behind_clients(self, row: InputRow) -> InputRow:
        if row.url == "/v1/embeddings" or not self._has_priority(row.body["model"]):
            return row
        asked = row.body.get("priority")
        priority = max(PRIORITY, asked) if isinstance(asked, int) else PRIORITY
        return InputRow(row.custom_id, row.url, {**row.body, "priority": priority})

    def _finish(
        self, batch: BatchObject, team: str, rows: BatchInput, progress: ProgressFile, status: BatchStatus
    ) -> None:
        batch = _counted(batch, rows, progress)
        if status == "completed":
            batch = self._batches.move(batch, "finalizing")
            status = "cancelled" if batch.status == "cancelling" else status
        with self._batches.files.partial() as output, self._batches.files.partial() as errors:
            output.check_free(progress.size)  # the results are a part of what the progress file holds
            write_results(progress, len(rows), output.path, errors.path)
            output.size, errors.size = output.path.stat().st_size, errors.path.stat().st_size
            self._batches.finish(batch, team, status, output, errors)

    def _remove(self, batch_id: str) -> None:
        """Removes the files that only an unfinished batch needs."""
        for suffix in ("progress", "lock"):
            with suppress(FileNotFoundError):
                (self._batches.files.folder / f"{batch_id}.{suffix}").unlink()


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `work` in a thread and returns its result.

    Even if this task is cancelled, it waits for the thread to end, because the batch's lock must be held until then.
    """
    running = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _counted(batch: BatchObject, rows: BatchInput, progress: ProgressFile) -> BatchObject:
    counts = RequestCounts(total=len(rows), completed=progress.completed, failed=progress.failed)
    return batch.model_copy(update={"request_counts": counts, "usage": BatchTokens.of_rows(progress.usage)})


def _expire(rows: BatchInput, progress: ProgressFile) -> None:
    """Records the rows that have not run as failed because the batch has expired."""
    message = "This request could not be executed before the completion window expired."
    left = [place for place in range(len(rows)) if place not in progress]
    for start in range(0, len(left), 1000):
        group = left[start : start + 1000]
        progress.append([failed_row(place, rows.row(place).custom_id, "batch_expired", message) for place in group])
