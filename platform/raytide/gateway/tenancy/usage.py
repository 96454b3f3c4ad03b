"""Reports finished requests to the control API in batches, and repeats a report until it arrives. No request is billed
twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from contextlib import suppress

from raytide.core.errors import RaytideError, UsageError
from raytide.core.objects.api_key import MOST_BATCH, RequestUsage, UsageBatch
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.usage_journal import UsageJournal

EVERY_S = 0.5
MOST_QUEUED = 50_000
"""The number of unreported requests above which requests with a key are refused, so that none goes unbilled."""
FLUSH_S = 5.0
"""The seconds for the last reports at shutdown."""
_log = logging.getLogger(__name__)


class UsageReporter:
    """A bounded queue of finished requests, with the task that reports them to the control API in order."""

    def __init__(self, api: ControlApi, journal: UsageJournal | None = None) -> None:
        self._api, self._journal = api, journal
        self._requests: deque[RequestUsage] = deque()
        self._released: deque[str] = deque(maxlen=MOST_QUEUED)  # the API forgets lost ones with their gateway
        self._refused = 0
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._is_closing = False

    def start(self) -> asyncio.Task[None]:
        """Starts the reporting task and returns it. The task first reports the requests that killed gateways left in
        their journals.
        """
        if self._journal is not None:
            self._requests.extend(self._journal.take_over())
        self._task = asyncio.create_task(self._run())
        return self._task

    async def close(self, timeout_s: float = FLUSH_S) -> None:
        """Reports the remaining requests, for at most `timeout_s` seconds."""
        self._is_closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._requests:
            _log.error("%d requests could not be reported", len(self._requests))
        if self._journal is not None:
            self._journal.close()

    @property
    def is_full(self) -> bool:
        return len(self._requests) >= MOST_QUEUED

    def report(self, request: RequestUsage) -> None:
        """Queues a finished request for the next report. The report also ends the request's budget reservation.

        If the queue is full, requests without a key are dropped.
        """
        if request.key or not self.is_full:
            self._requests.append(request)
        if request.key and self._journal is not None:
            self._journal.add(request)

    def report_refused(self, request: RequestUsage | None) -> None:
        """Queues a refused request. If the sender is unknown or the queue is half full, the refusal is only counted."""
        if request is None or len(self._requests) >= MOST_QUEUED // 2:
            self._refused += 1
        else:
            self._requests.append(request)

    def release(self, id: str) -> None:
        """Ends a budget reservation whose request cost nothing. `id` is the reservation's id."""
        self._released.append(id)

    async def _run(self) -> None:
        problem = ""
        while True:
            batch = self._next_batch()
            if not (batch.requests or batch.released or batch.refused):
                if self._is_closing:
                    return
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), EVERY_S)
                continue
            try:
                await self._send(batch)
                problem = ""
            except RaytideError as error:
                if problem != (problem := str(error)):
                    _log.warning("cannot report usage, so it waits: %s", problem)
                await asyncio.sleep(random.uniform(0.1, 0.5))
                continue
            self._sent(batch)
            if len(self._requests) < MOST_BATCH and not self._is_closing:
                await asyncio.sleep(EVERY_S)

    def _next_batch(self) -> UsageBatch:
        """Returns a batch of the oldest waiting requests and releases. They stay in the queue until the batch is
        delivered.
        """
        requests = tuple(self._requests[n] for n in range(min(MOST_BATCH, len(self._requests))))
        released = tuple(self._released[n] for n in range(min(MOST_BATCH, len(self._released))))
        return UsageBatch(gateway=self._api.gateway, requests=requests, released=released, refused=self._refused)

    def _sent(self, batch: UsageBatch) -> None:
        for _ in batch.requests:
            self._requests.popleft()
        gone = set(batch.released)
        while self._released and self._released[0] in gone:
            self._released.popleft()
        self._refused -= batch.refused
        if self._journal is not None:
            self._journal.keep(self._requests)

    async def _send(self, batch: UsageBatch) -> None:
        """Sends a batch. If the API rejects its content, it finds the rejected requests and reports all others."""
        try:
            await self._api.settle(batch)
        except UsageError as error:
            if len(batch.requests) <= 1:
                _log.error("the API rejects the usage of a request, which is lost: %s %s", error, batch.requests)
                return
            half = len(batch.requests) // 2
            parts = (batch.requests[:half], batch.requests[half:])
            for part, counts in zip(parts, ({}, {"released": (), "refused": 0}), strict=True):
                await self._send(batch.model_copy(update={"requests": part, **counts}))
