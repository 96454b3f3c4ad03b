"""Admits requests of many teams to an engine, so that no team waits behind the backlog of another team.

The requests of all gateway processes come together in the engine's process. The engine has a limited number of places,
each for one running sequence. Requests that find no free place wait in a fair queue here, not in the engine's own
queue.

When no place is free, a team with less than half of its share may preempt a request of another team. That other team
must hold more places, relative to its weight, than the first team. The engine stops the preempted request and later
continues it from its tokens, so the client sees only a pause. If a time to the first token is promised, a team's
requests that can still meet the promise go before the team's late requests (deadline_queue.py).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from raytide.actors.engine.backends.remote.admission_entry import AdmissionEntry
from raytide.actors.engine.backends.remote.direct_output import DirectOutput
from raytide.actors.engine.backends.remote.fair_queue import FairQueue
from raytide.actors.engine.base import StreamProgress, aborted_chunks
from raytide.actors.engine.limits import MAX_PRIORITY
from raytide.actors.engine.types import EngineInfo, GenChunk, GenRequest
from raytide.core.errors import ConflictError, OverloadedError, RaytideError

START_WEIGHT = 0.1
"""The weight of the latest start in the moving average of the time to a first token."""
SPARE_SHARE = 16
"""For every SPARE_SHARE places, one more request waits in the engine itself, so that a place that becomes free is used
at once.
"""


@dataclass(slots=True)
class _Team:
    weight: float = 1.0
    places: int = 0
    """The places that the team's requests take in the engine."""
    requests: int = 0
    """The number of the team's requests, waiting or running."""


class Generator(Protocol):
    """The two engine methods that the admission calls."""

    def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]: ...

    async def abort(self, request_id: str) -> bool: ...


class FairAdmission:
    """Admits requests to one engine. Use it from one event loop. If the engine does not report how many sequences it
    can run at the same time, it gets every request immediately.

    `direct` has the chunks that the engine's thread sent to clients directly, without this object. These chunks are
    counted before each decision. `slo_ttft_s` is the promised time to a first token in seconds. If it is None, a team's
    requests start in the order of their arrival.
    """

    def __init__(
        self,
        engine: Generator,
        info: EngineInfo,
        direct: DirectOutput,
        can_resume: Callable[[GenRequest], bool] = lambda request: True,
        *,
        slo_ttft_s: float | None = None,
    ) -> None:
        self._engine, self._info, self._direct, self._can_resume = engine, info, direct, can_resume
        self._slo_ttft_s = math.inf if slo_ttft_s is None else slo_ttft_s
        self._start_s: float | None = None
        """The moving average of the seconds from a start to the first token; None before the first."""
        self._spare = min(-(-info.max_running // SPARE_SHARE), info.max_waiting)
        self._queue: FairQueue[AdmissionEntry] = FairQueue()
        self._entries: dict[str, AdmissionEntry] = {}
        self._teams: dict[str, _Team] = {}
        self._preempting: set[AdmissionEntry] = set()
        """The requests that the engine has been asked to end. Their places already count as free: a request that takes
        such a place reaches the engine after the order to end, and so misses no step.
        """
        self._aborting: set[asyncio.Task[None]] = set()
        self._asked = self._used = self._kv_tokens = self._unanswered = 0
        self._starts = itertools.count(1)
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """The number of requests that wait in the fair queue."""
        return len(self._queue)

    async def generate(self, request: GenRequest, waited_s: float = 0.0) -> AsyncGenerator[GenChunk]:
        """Waits for the request's turn, then streams its output from the engine. Raises OverloadedError if too many
        requests wait.

        `waited_s` is the time in seconds for which the request has already waited elsewhere.
        """
        if not self._info.max_running:
            async with aclosing(self._engine.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
            return
        entry = self._enter(request, waited_s)
        try:
            while True:
                await self._await_turn(entry)
                if entry.is_aborted:
                    for chunk in aborted_chunks(entry.progress.resumed(), len(request.prompt)):
                        yield chunk
                    return
                async with aclosing(self._engine.generate(entry.remainder())) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        if (passed := self._passed(entry, chunk)) is not None:
                            yield passed
                if not entry.is_preempted:
                    return
                self._queue_again(entry)
        finally:
            self._exit(entry)

    async def abort(self, request_id: str) -> bool:
        """Ends a request, whether it runs in the engine or waits in the fair queue. Returns False for an unknown
        request.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.is_running:
            return await self._engine.abort(request_id)
        entry.is_aborted = True
        self._queue.remove(entry)
        if not entry.turn.done():
            entry.turn.set_result(None)
        return True

    def check_unused(self, lora: str) -> None:
        """Raises ConflictError if a request uses this adapter. The engine does not know those that wait here."""
        if any(entry.request.lora == lora for entry in self._entries.values()):
            raise ConflictError(f"requests use adapter {lora}.", hint="Unload it when they have ended.")

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests and waits until all earlier requests have ended. After `timeout_s` seconds, the requests
        that still wait in the queue are refused.
        """
        self._is_draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        for entry in list(self._entries.values()):
            self._refuse(entry)

    def _enter(self, request: GenRequest, waited_s: float) -> AdmissionEntry:
        if self._is_draining:
            raise OverloadedError(f"engine {self._info.model} takes no more requests now.", hint="Retry elsewhere.")
        if request.request_id in self._entries:
            raise ConflictError(
                f"request {request.request_id} is already running.", hint="Give each request its own id."
            )
        loop = asyncio.get_running_loop()
        entry = AdmissionEntry(
            request,
            StreamProgress(request),
            min(request.sampling.num_samples, self._info.max_running),
            max(-MAX_PRIORITY, min(MAX_PRIORITY, request.priority)),
            loop.create_future(),
            loop.time() - waited_s + self._slo_ttft_s,
        )
        if self._asked + entry.places > self._info.max_running + self._info.max_waiting:
            self._make_room(request, entry.places)
        self._entries[request.request_id] = entry
        self._idle.clear()
        team = self._teams.setdefault(request.team, _Team())
        team.weight = request.weight
        team.requests += 1
        self._asked += entry.places
        self._queue.push(
            entry,
            request.team,
            len(request.prompt),
            weight=request.weight,
            priority=entry.priority,
            due_s=entry.due_s,
            needs_s=self._start_s or 0.0,
        )
        self.dispatch()
        return entry

    def _exit(self, entry: AdmissionEntry) -> None:
        if entry.is_running:
            self._leave(entry)
        self._queue.remove(entry)
        del self._entries[entry.request.request_id]
        self._asked -= entry.places
        team = self._teams[entry.request.team]
        team.requests -= 1
        if not team.requests:
            del self._teams[entry.request.team]
        self.dispatch()
        if not self._entries:
            self._idle.set()

    async def _await_turn(self, entry: AdmissionEntry) -> None:
        if entry.gave_way and entry.turn.done():
            await asyncio.sleep(0)  # the one for which it left, whose turn came first, reaches the engine first
        await entry.turn

    def _queue_again(self, entry: AdmissionEntry) -> None:
        """Queues a preempted request before its place is given away, so that its team is not passed over for it."""
        self._leave(entry)
        entry.turn = asyncio.get_running_loop().create_future()
        request = entry.request
        # One token, so that a team that has had little goes before it also when both start at the same time.
        self._queue.push(entry, request.team, 1, weight=request.weight, priority=entry.priority, again=True)
        self.dispatch()

    def _make_room(self, request: GenRequest, places: int) -> None:
        """Makes room in the queue for a new request: refuses the newest waiting request of the team that has the most
        requests for its weight.

        Raises OverloadedError if that is the new request's own team. Preempted requests do not count against the limit
        and are never refused.
        """
        waiting = [each for each in self._entries.values() if not (each.is_running or each.turn.done())]
        queued = [each for each in waiting if not each.tokens]
        begun = sum(each.places for each in waiting if each.tokens)
        if self._asked + places - begun <= self._info.max_running + self._info.max_waiting:
            return
        weights = {each.request.team: each.request.weight for each in queued} | {request.team: request.weight}
        counts = {name: team.requests + (name == request.team) for name, team in self._teams.items()}
        longest = max(weights, key=lambda team: counts.get(team, 1) / weights[team])
        if longest == request.team:
            raise self._full()
        self._refuse(next(each for each in reversed(queued) if each.request.team == longest))

    def _refuse(self, entry: AdmissionEntry) -> None:
        """Ends a waiting request with OverloadedError."""
        if self._queue.remove(entry) and not entry.turn.done():
            entry.turn.set_exception(self._full())

    def _full(self) -> OverloadedError:
        return OverloadedError(f"{self.waiting} requests wait for engine {self._info.model}.", hint="Retry later.")

    def dispatch(self) -> None:
        """Starts the next requests of the queue, as long as the engine can run more sequences. It must be called
        regularly, because the order of the queue changes while teams are served. The order changes even if no request
        arrives or ends.

        A request of several samples starts as soon as the engine can run one of them. Its other samples wait inside
        the engine. If the request waited until all could run at once, it would hold up the queue.
        """
        if not self._queue:
            return
        now_s = asyncio.get_running_loop().time()
        for entry in self._entries.values():
            if entry.is_running:
                self._count_direct(entry)
        capacity = self._info.num_blocks * self._info.block_size
        while (head := self._queue.head(now_s)) is not None:
            if head.turn.done():  # it has been cancelled
                self._queue.pop(now_s)
                continue
            room = self._info.max_running - self._used
            # A prefix that requests share is counted for each of them, so what seems not to fit is tried one by one.
            fits_kv = not self._unanswered or self._kv_tokens + head.kv_tokens <= capacity
            if not (room > 0 and fits_kv):
                if self._preempting:
                    return
                victims = self._victims(head, 1 - room, 0 if fits_kv else head.kv_tokens)
                for victim in victims:
                    self._preempt(victim)
                if not victims and not (room + self._spare > 0 and fits_kv):
                    return
            self._start(self._queue.pop(now_s), now_s)

    def _start(self, entry: AdmissionEntry, now_s: float) -> None:
        entry.is_running, entry.is_answered, entry.is_preempted = True, False, False
        entry.started, entry.started_s = next(self._starts), now_s
        self._direct.begin(entry.request.request_id)
        self._count_places(entry, 1)
        entry.turn.set_result(None)

    def _leave(self, entry: AdmissionEntry) -> None:
        entry.is_running = False
        if entry in self._preempting:
            self._preempting.discard(entry)
        else:
            self._count_places(entry, -1)

    def _count_places(self, entry: AdmissionEntry, sign: int) -> None:
        """Adds a request's places and KV tokens to those in use in the engine; with a `sign` of -1, subtracts them."""
        self._used += sign * entry.places
        self._unanswered += sign * (not entry.is_answered)
        self._kv_tokens += sign * entry.kv_tokens
        self._teams[entry.request.team].places += sign * entry.places

    def _passed(self, entry: AdmissionEntry, chunk: GenChunk) -> GenChunk | None:
        """Counts a chunk and returns it as the client gets it. Returns None for the last chunk of a preempted request,
        which continues later; text that the engine held back comes then.
        """
        self._count_direct(entry)
        if entry in self._preempting and chunk.finish_reason == "abort":
            entry.is_preempted = entry.gave_way = True
            if chunk.usage is not None and entry.tokens and entry.cached_tokens is None:
                entry.cached_tokens = chunk.usage.cached_tokens
            self._direct.skip(entry.request.request_id)
            return None
        self._count(entry, chunk)
        if not entry.is_answered:
            entry.is_answered = True
            self._unanswered -= entry not in self._preempting
            took_s = asyncio.get_running_loop().time() - entry.started_s
            self._start_s = took_s if self._start_s is None else self._start_s + START_WEIGHT * (took_s - self._start_s)
            self.dispatch()
        if chunk.usage is None or entry.cached_tokens is None:
            return chunk
        return replace(chunk, usage=replace(chunk.usage, cached_tokens=entry.cached_tokens))

    def _count_direct(self, entry: AdmissionEntry) -> None:
        for chunk in self._direct.sent(entry.request.request_id):
            self._count(entry, chunk)

    def _count(self, entry: AdmissionEntry, chunk: GenChunk) -> None:
        count = len(chunk.token_ids)
        entry.progress.add(chunk)
        entry.tokens += count
        if entry not in self._preempting:
            self._kv_tokens += count
        request = entry.request
        self._queue.charge(request.team, count, weight=request.weight, priority=entry.priority)

    def _victims(self, head: AdmissionEntry, places: int, kv_tokens: int) -> list[AdmissionEntry]:
        """Returns the requests to preempt so that `head` can start at once; none if `head` has no right to that.

        Less urgent requests may always be preempted. Others may be if the team of `head` holds less than half of its
        share, and if their own team afterwards still holds at least as many places for its weight. The least urgent are
        chosen first, then those of the team with the most places for its weight. Among these, the ones without a token
        are chosen first, newest first, because they may still wait in the engine; then those with the fewest tokens to
        compute again.
        """
        if "resume" not in self._info.features:
            return []
        own = self._teams[head.request.team]
        share = self._info.max_running * own.weight / sum(team.weight for team in self._teams.values())
        least = (own.places + head.places) / own.weight if 2 * own.places < share else math.inf
        left = {name: team.places for name, team in self._teams.items()}
        victims: list[AdmissionEntry] = []
        running = (
            each
            for each in self._entries.values()
            if each.is_preemptible and each not in self._preempting and self._can_resume(each.request)
        )
        for each in sorted(running, key=self._preemption_order):
            if places <= 0 and kv_tokens <= 0:
                break
            name = each.request.team
            team = self._teams[name]
            if each.places == 1:
                has_more = (left[name] - 1) / team.weight >= least
            else:  # it goes as a whole, even if it is all that its team has; never for one of as many samples
                has_more = left[name] / team.weight > least
            if each.priority < head.priority or (each.priority == head.priority and not has_more):
                continue
            victims.append(each)
            left[name] -= each.places
            places -= each.places
            kv_tokens -= each.kv_tokens if each.is_answered else 0
        return victims if places <= 0 and kv_tokens <= 0 else []

    def _preemption_order(self, entry: AdmissionEntry) -> tuple[float, ...]:
        team = self._teams[entry.request.team]
        cost = entry.kv_tokens if entry.is_answered else -entry.started
        return -entry.priority, -team.places / team.weight, entry.is_answered, cost

    def _preempt(self, victim: AdmissionEntry) -> None:
        async def abort() -> None:
            is_ending = False
            with suppress(RaytideError):  # a dead engine ends its requests itself
                is_ending = await self._engine.abort(victim.request.request_id)
            if not is_ending and victim in self._preempting:
                self._preempting.discard(victim)
                self._count_places(victim, 1)
                self.dispatch()

        self._count_places(victim, -1)
        self._preempting.add(victim)
        self._aborting.add(task := asyncio.create_task(abort()))
        task.add_done_callback(self._aborting.discard)
