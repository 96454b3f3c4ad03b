"""Serves the long polls in which drivers wait for changes of their leases. One watcher reads the store for all polls,
ten times a second.

The watcher reads a counter that each commit of jobs or leases increments. When the counter has changed, one query
finds the polled leases that changed, and one read loads them. Unchanged leases are answered from memory. If a polled
lease is not in memory, the poll itself reads the lease from the store. A poll by a GANG job's driver counts as the
driver's heartbeat. Heartbeats are written in batches.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread
from starlette.types import Receive

from raytide.control.reconcile.driver_silence import disconnected_heartbeat_s
from raytide.control.views import to_json
from raytide.core.clock import Clock
from raytide.core.errors import LeaseLostError, NotFoundError, RaytideError, StorageError
from raytide.core.objects.gang import Lease, LeaseState
from raytide.core.objects.job import Job, JobKind, JobState
from raytide.core.state import Store
from raytide.core.state.queries.jobs import LeaseKey

POLL_S = 0.1
BEAT_S = 1.0
_BEATS = 5
"""The number of heartbeats written within a job's timeout; at most one is written every BEAT_S seconds."""
_KEPT_S = 10.0
"""The time that an unpolled lease stays in memory, in seconds; drivers poll again at once."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PolledLease:
    """A job and its lease, which were read together. They contain all changes up to `version` of the store. Both are
    read again after one of them has changed.
    """

    job: Job
    lease: Lease
    key: LeaseKey
    version: int
    asked_s: float = 0.0
    beat_s: float = -math.inf
    """The monotonic time of its last written heartbeat."""
    body: bytes = b""

    @property
    def is_gang(self) -> bool:
        return self.job.spec.kind is JobKind.GANG

    @property
    def beat_every_s(self) -> float:
        return self.job.spec.heartbeat_timeout_s / _BEATS

    def to_bytes(self) -> bytes:
        """Returns the lease as JSON."""
        self.body = self.body or json.dumps(to_json(self.lease), ensure_ascii=True).encode()
        return self.body


class LeasePolls:
    """All long polls for leases in one API process."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._leases: dict[str, PolledLease] = {}
        self._version, self._is_grown = -1, False
        """The version at which all leases were checked, and whether some were added since."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._polled: set[str] = set()
        """GANG jobs whose driver polled since heartbeats were last written."""
        self._disconnected: set[str] = set()
        """GANG jobs whose driver disconnected since heartbeats were last written."""
        self._watcher: asyncio.Task[None] | None = None
        self._beater: asyncio.Task[None] | None = None
        self._reads, self._refreshes, self._beats = CapacityLimiter(8), CapacityLimiter(1), CapacityLimiter(1)

    async def wait(
        self, job_id: str, check: Callable[[Job], object], newer_than: int, timeout_s: float, receive: Receive
    ) -> bytes | None:
        """Returns the lease as JSON as soon as its epoch differs from `newer_than`. After `timeout_s` seconds, returns
        the lease even if its epoch is `newer_than`. If the job has got another lease, the epoch is lower than
        `newer_than`. Returns None if the client disconnects.

        `check` must raise an error if the caller may not see the job. Raises LeaseLostError if the job is over or is
        being stopped. Raises NotFoundError if the job does not exist.
        """
        deadline_s = time.monotonic() + timeout_s
        gone: asyncio.Task[None] | None = None
        try:
            while True:
                seen = self._leases.get(job_id) if timeout_s else None
                if seen is None or seen.lease.epoch < newer_than:  # of another lease, or read too early
                    seen = await self._first(job_id, check, is_beat=not timeout_s)
                check(seen.job)
                _require_held(seen.job)
                seen.asked_s = time.monotonic()
                left_s = deadline_s - seen.asked_s
                if seen.is_gang and timeout_s:
                    self._polled.add(job_id)
                    self._disconnected.discard(job_id)
                    self._keep_watching()
                if seen.lease.epoch != newer_than or left_s <= 0:
                    return seen.to_bytes()
                gone = gone or asyncio.create_task(_wait_for_disconnect(receive))
                if not await self._changed(job_id, gone, left_s):
                    if seen.is_gang and job_id not in self._waiting:
                        self._disconnected.add(job_id)
                    return None
        finally:
            if gone is not None:
                gone.cancel()

    def lease(self, job: Job) -> Lease:
        """Returns the job's lease. While the job waits in the queue, the lease is WAITING with epoch -1. Raises
        LeaseLostError if the job is over or is being stopped."""
        _require_held(job)
        return _lease(job, self._store.lease_of(job.id))

    def on_disconnect(self, job_ids: Iterable[str]) -> None:
        """Shortens the heartbeat timeout of drivers that disconnected during a poll, because a killed driver
        disconnects in this way.

        A live driver polls again before the shorter timeout ends.
        """
        gone_s = disconnected_heartbeat_s(self._clock.now_s())
        jobs = self._store.jobs_of(list(job_ids))
        self._store.heartbeats({job.id: gone_s for job in jobs if not job.is_final})

    async def _first(self, job_id: str, check: Callable[[Job], object], *, is_beat: bool) -> PolledLease:
        found = await to_thread.run_sync(self._read, [job_id], limiter=self._reads)
        if job_id not in found:
            raise NotFoundError(f"job {job_id} does not exist.", hint="`raytide ps` lists jobs.")
        seen = found[job_id]
        check(seen.job)  # before the request counts as a heartbeat
        if is_beat:
            if seen.is_gang and not seen.job.is_final:
                await to_thread.run_sync(self._beat, {job_id}, limiter=self._reads)
            return seen
        kept = self._leases.get(job_id)
        if kept is None or kept.version < seen.version:
            self._leases[job_id], self._is_grown = seen, True
        return self._leases[job_id]

    async def _changed(self, job_id: str, gone: asyncio.Task[None], timeout_s: float) -> bool:
        """Waits for the watcher or the timeout; returns False if the client disconnected."""
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(changed)
        self._keep_watching()
        try:
            await asyncio.wait((changed, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting[job_id].discard(changed)
            if not self._waiting[job_id]:
                del self._waiting[job_id]
        return not gone.done()

    def _keep_watching(self) -> None:
        loop = asyncio.get_running_loop()
        if self._watcher is None or self._watcher.done() or self._watcher.get_loop() is not loop:
            self._watcher = loop.create_task(self._watch())

    async def _watch(self) -> None:
        """Watches the store for changed leases while drivers wait, and for a moment after."""
        beat_s = 0.0
        while self._leases or self._polled or self._disconnected:
            try:
                await self._refresh()
            except RaytideError as error:
                _log.warning("cannot read leases: %s", error)
            if time.monotonic() - beat_s >= BEAT_S:
                beat_s = time.monotonic()
                self._start_beats()
                self._forget(beat_s)
            await asyncio.sleep(POLL_S)

    async def _refresh(self) -> None:
        version = await to_thread.run_sync(self._store.census.version, limiter=self._refreshes)
        if version == self._version and not self._is_grown:
            return
        self._is_grown = False  # leases added during the read are read next time
        before = dict(self._leases)
        changed = await to_thread.run_sync(self._read_changed, before, version, limiter=self._refreshes)
        self._version = version
        for seen in before.values():
            seen.version = max(seen.version, version)
        for job_id, seen in changed.items():
            seen.asked_s = self._leases[job_id].asked_s if job_id in self._leases else time.monotonic()
            self._leases[job_id] = seen
            for waiter in self._waiting.get(job_id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def _read_changed(self, seen: dict[str, PolledLease], version: int) -> dict[str, PolledLease]:
        oldest = min((each.version for each in seen.values()), default=version)
        if oldest >= version:
            return {}
        touched = self._store.census.touched_since(oldest) & seen.keys()
        keys = self._store.census.lease_keys(touched)
        return self._read([job_id for job_id in touched if keys.get(job_id) != seen[job_id].key])

    def _read(self, job_ids: list[str]) -> dict[str, PolledLease]:
        """Returns jobs with their leases. What it reads may be newer than `version`."""
        if not job_ids:
            return {}
        version = self._store.census.version()
        leases = self._store.census.leases(job_ids)
        jobs = self._store.jobs_of(job_ids)
        return {
            job.id: PolledLease(job, _lease(job, one := leases.get(job.id)), _key(job, one), version) for job in jobs
        }

    def _start_beats(self) -> None:
        """Starts a task that writes heartbeats, so that drivers do not wait for a write."""
        if self._beater is not None and not self._beater.done():
            return
        here = {job_id for job_id in self._waiting if job_id in self._leases and self._leases[job_id].is_gang}
        left = {job_id for job_id in self._disconnected - here if job_id in self._leases}
        now_s = time.monotonic()
        beats = {
            job_id
            for job_id in (here | self._polled) - left
            if (seen := self._leases.get(job_id)) is not None and now_s - seen.beat_s >= seen.beat_every_s
        }
        for job_id in beats:
            self._leases[job_id].beat_s = now_s
        for job_id in left:
            self._leases[job_id].beat_s = -math.inf
        self._polled, self._disconnected = set(), set()
        if beats or left:
            self._beater = asyncio.create_task(self._write_beats(beats, left))

    async def _write_beats(self, beats: set[str], left: set[str]) -> None:
        if beats:
            await to_thread.run_sync(self._beat, beats, limiter=self._beats)
        if left:
            with suppress(StorageError):
                await to_thread.run_sync(self.on_disconnect, left, limiter=self._beats)

    def _beat(self, job_ids: set[str]) -> None:
        with suppress(StorageError):  # leases are answered anyway
            self._store.heartbeats(dict.fromkeys(job_ids, self._clock.now_s()))

    def _forget(self, now_s: float) -> None:
        for job_id in [job_id for job_id, seen in self._leases.items() if now_s - seen.asked_s > _KEPT_S]:
            if job_id not in self._waiting:
                del self._leases[job_id]


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _require_held(job: Job) -> None:
    if job.is_final or job.state is JobState.STOPPING:
        raise LeaseLostError(f"{job.id} is {job.state}: {job.reason}", hint="Submit it again.")


def _lease(job: Job, lease: Lease | None) -> Lease:
    if lease is not None and lease.state is not LeaseState.RELEASED:
        return lease
    return Lease(id="", job_id=job.id, shape=job.spec.gang.shapes[0], state=LeaseState.WAITING, members=(), epoch=-1)


def _key(job: Job, lease: Lease | None) -> LeaseKey:
    if lease is None:
        return LeaseKey(str(job.state))
    return LeaseKey(str(job.state), lease.id, str(lease.state), lease.epoch)
