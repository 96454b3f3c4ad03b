"""Sends the requests of a load test and measures the answers. The generator's event loop runs in a thread of its own,
so that the generator works in notebooks.

The generator also measures itself: the share of a core that it used, and how late it sent requests. If it sent
requests too late, the report measures the generator rather than the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import aiohttp
import uvloop

from raytide.core.errors import EngineError
from raytide.sdk.bench.load.report import BenchReport, GeneratorLoad, report_of
from raytide.sdk.bench.load.requests import BenchRequest, requests_of, warm_up_of
from raytide.sdk.bench.load.spec import DEFAULT_CONCURRENCY, BenchSpec
from raytide.sdk.bench.load.stream import BenchRecord, send

_HEARTBEAT_S = 0.02
_LOOK_S = 0.2
_STOP_S = 10.0
_CONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """The progress of a running load."""

    is_warming_up: bool
    elapsed_s: float
    sent: int
    ended: int
    failed: int
    output_tokens: int
    """The tokens of the requests that have ended."""
    most_requests: int | None
    """The most requests that will be sent; None if only the duration or the end of a trace limits them."""


class LoadGenerator:
    """Sends the requests of a spec once. `records` contains a record of each request that was sent."""

    def __init__(self, spec: BenchSpec, *, api_key: str = "") -> None:
        self._spec = spec
        self._url = f"{spec.base_url.rstrip('/')}/{'chat/completions' if spec.api == 'chat' else 'completions'}"
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self.records: list[BenchRecord] = []
        self._is_warming_up = True
        self._is_interrupted = False
        self._start_s = 0.0
        self._elapsed_s = 0.0
        self._cpu_s = 0.0
        self._late_s = array("d")
        self._ended = self._failed = self._tokens = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._work: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def run(self, on_progress: Callable[[BenchProgress], None] | None = None) -> BenchReport:
        """Sends all requests and returns the report. A keyboard interrupt ends the load early, and the report then
        covers the requests sent so far.

        Raises EngineError if no warm-up request was answered, and DataError if a file of the spec cannot be used.
        """
        thread = threading.Thread(target=self._main, name="raytide-bench", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_LOOK_S)
                if on_progress is not None:
                    on_progress(self.progress())
        except KeyboardInterrupt:
            self._is_interrupted = True
            if self._loop is not None and self._work is not None:
                with suppress(RuntimeError):  # the loop has just been closed: the load is over
                    self._loop.call_soon_threadsafe(self._work.cancel)
            thread.join(_STOP_S)
        if self._failure is not None:
            raise self._failure
        return self._report(is_interrupted=self._is_interrupted)

    def progress(self) -> BenchProgress:
        return BenchProgress(
            is_warming_up=self._is_warming_up,
            elapsed_s=0.0 if self._is_warming_up else time.perf_counter() - self._start_s,
            sent=len(self.records),
            ended=self._ended,
            failed=self._failed,
            output_tokens=self._tokens,
            most_requests=self._spec.most_requests,
        )

    def _report(self, *, is_interrupted: bool) -> BenchReport:
        sent_late_s = [record.sent_s - record.due_s for record in self.records]
        load = GeneratorLoad.measured(self._cpu_s, self._elapsed_s, self._late_s, sent_late_s)
        return report_of(self._spec, self.records, self._elapsed_s, load, is_interrupted=is_interrupted)

    def _main(self) -> None:
        try:
            uvloop.run(self._cancellable())
        except BaseException as error:  # raised again by the thread that waits
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._failure = error

    async def _cancellable(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = asyncio.create_task(self._measure())
        if self._is_interrupted:  # before there was anything to cancel
            self._work.cancel()
        await asyncio.wait([self._work])
        if not self._work.cancelled():
            self._work.result()

    async def _measure(self) -> None:
        timeout = aiohttp.ClientTimeout(total=self._spec.timeout_s, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers) as session:
            await self._warm_up(session)
            requests = requests_of(self._spec)
            pulse = asyncio.create_task(self._watch_itself())
            cpu_s, self._start_s = time.thread_time(), time.perf_counter()
            self._is_warming_up = False
            try:
                if self._spec.in_flight is not None:
                    await self._closed_loop(session, requests, self._spec.in_flight)
                else:
                    await self._open_loop(session, requests)
            finally:
                self._elapsed_s = time.perf_counter() - self._start_s
                self._cpu_s = time.thread_time() - cpu_s
                pulse.cancel()

    async def _warm_up(self, session: aiohttp.ClientSession) -> None:
        requests = warm_up_of(self._spec)
        records: list[BenchRecord] = []

        async def user() -> None:
            for request in requests:
                record = BenchRecord(0.0)
                records.append(record)
                await send(session, self._url, self._encoded(request), record, time.perf_counter())

        async with asyncio.TaskGroup() as users:
            for _ in range(min(self._spec.warmup, self._spec.in_flight or DEFAULT_CONCURRENCY)):
                users.create_task(user())
        if records and not any(record.is_answered for record in records):
            raise EngineError(
                f"{self._url} answered none of {len(records)} requests: {records[0].error}.",
                hint="Check its address, the model's name, and RAYTIDE_API_KEY if it needs a key.",
            )

    async def _closed_loop(self, session: aiohttp.ClientSession, requests: Iterator[BenchRequest], users: int) -> None:
        async def user() -> None:
            for request in requests:
                due_s = time.perf_counter() - self._start_s
                if self._spec.duration_s is not None and due_s > self._spec.duration_s:
                    return
                await self._send(session, request, due_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(users):
                group.create_task(user())

    async def _open_loop(self, session: aiohttp.ClientSession, requests: Iterator[BenchRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due_s = request.at_s or 0.0
                await asyncio.sleep(max(0.0, self._start_s + due_s - time.perf_counter()))
                group.create_task(self._send(session, request, due_s))

    async def _send(self, session: aiohttp.ClientSession, request: BenchRequest, due_s: float) -> None:
        record = BenchRecord(due_s, prompt_tokens=request.prompt_tokens, wanted_tokens=request.output_tokens)
        self.records.append(record)
        await send(session, self._url, self._encoded(request), record, self._start_s)
        self._ended += 1
        self._failed += bool(record.error)
        self._tokens += record.output_tokens

    def _encoded(self, request: BenchRequest) -> bytes:
        return json.dumps(request.body(self._spec), separators=(",", ":")).encode()

    async def _watch_itself(self) -> None:
        """Records the lateness of the event loop in seconds, because answers are seen that much too late."""
        while True:
            due_s = time.perf_counter() + _HEARTBEAT_S
            await asyncio.sleep(_HEARTBEAT_S)
            self._late_s.append(max(0.0, time.perf_counter() - due_s))
