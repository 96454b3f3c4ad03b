"""Runs the rows of a batch that have no result yet, several at a time, and records each result."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from raytide.actors.serving.batch.input_file import BatchInput, InputRow
from raytide.actors.serving.batch.progress_file import ProgressFile, RowResult, to_line
from raytide.core.io.storage import full_disk_is_an_error, is_full_disk

_log = logging.getLogger(__name__)
_FULL_DISK_PAUSE_S = 2.0


async def run_rows(
    rows: BatchInput,
    progress: ProgressFile,
    request: Callable[[int, InputRow], Awaitable[RowResult]],
    *,
    at_once: int,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Runs the rows in order and returns when every row has a result. Once `is_stopping()` returns True, the function
    starts no more rows, and returns when the rows in flight have results. If the function is cancelled, it drops the
    rows in flight.

    There are `at_once` workers. A worker takes its next row only after the result of its previous row is recorded. A
    crash therefore loses at most `at_once` results.
    """
    pending = iter([place for place in range(len(rows)) if place not in progress])
    recorder = _Recorder(progress)
    recording = asyncio.create_task(recorder.run())
    begun = takewhile(lambda _: not is_stopping(), pending)
    workers = [asyncio.create_task(_work(rows, begun, request, recorder)) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        await recorder.close()
        recording.cancel()
        with suppress(asyncio.CancelledError):
            await recording


async def _work(
    rows: BatchInput,
    pending: Iterator[int],
    request: Callable[[int, InputRow], Awaitable[RowResult]],
    recorder: _Recorder,
) -> None:
    for place in pending:
        row = await asyncio.to_thread(rows.row, place)
        await recorder.record(await request(place, row))


class _Recorder:
    """Appends results in groups: those that arrive while one group is written form the next. A full disk delays them,
    but none is lost.
    """

    def __init__(self, progress: ProgressFile) -> None:
        self._progress = progress
        self._waiting: list[tuple[RowResult, asyncio.Future[None]]] = []
        self._news = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def record(self, result: RowResult) -> None:
        """Hands over a result and returns once it is on the disk."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((result, done))
        self._news.set()
        await done

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            self._is_idle.clear()
            try:
                await self._append([*self._waiting])
            finally:
                self._is_idle.set()

    async def close(self) -> None:
        """Waits for the group that is being written."""
        await self._is_idle.wait()

    async def _append(self, group: list[tuple[RowResult, asyncio.Future[None]]]) -> None:
        del self._waiting[: len(group)]
        while True:
            try:
                await asyncio.to_thread(self._progress.append, [result for result, _ in group])
            except Exception as error:
                if not (isinstance(error, OSError) and is_full_disk(error)):
                    for _, done in group:
                        if not done.done():
                            done.set_exception(error)
                    return
                if all(done.done() for _, done in group):  # cancelled: nobody waits for these
                    return
                _log.warning("the disk is full: the results of a batch wait for room")
                await asyncio.sleep(_FULL_DISK_PAUSE_S)
            else:
                break
        for _, done in group:
            if not done.done():
                done.set_result(None)


def write_results(progress: ProgressFile, rows: int, output: Path, errors: Path) -> None:
    """Writes the results to two files, in the order of the input, and syncs both to the disk. Raises StorageError if
    the disk is full.
    """
    with full_disk_is_an_error("the results of a batch"), output.open("wb") as good, errors.open("wb") as bad:
        for place in range(rows):
            if place in progress:
                result = progress.result(place)
                (good if result.is_ok else bad).write(to_line(result.line))
        for file in (good, bad):
            file.flush()
            os.fsync(file.fileno())
