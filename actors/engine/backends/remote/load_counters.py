"""Counts an engine's requests and measures their times to the first token, for raytide's controller."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from raytide.actors.engine.types import EngineStats
from raytide.core.errors import OverloadedError


class LoadCounters:
    """Totals of requests and first tokens since the start. A request counts as late if it was refused, or if its first
    token took longer than `slo_ttft_s` seconds.
    """

    def __init__(self, slo_ttft_s: float | None) -> None:
        self._slo_ttft_s = slo_ttft_s or float("inf")
        self._requests = self._first_tokens = self._late = 0
        self._first_token_s = 0.0
        self._unanswered: set[TrackedRequest] = set()

    @property
    def pending_tokens(self) -> int:
        """The uncached prompt tokens of requests that wait for their first token. Late requests are left out, since
        they go last.
        """
        return sum(request.new_tokens for request in self._unanswered if not request.is_late)

    def track(self, waited_s: float, new_tokens: int = 0) -> TrackedRequest:
        """Counts a request and returns its timer. The request has already waited `waited_s` seconds elsewhere.
        `new_tokens` is the number of its prompt tokens that are not cached.
        """
        self._requests += 1
        request = TrackedRequest(self, time.perf_counter() - waited_s, new_tokens)
        self._unanswered.add(request)
        return request

    def first_token(self, request: TrackedRequest) -> None:
        self._unanswered.discard(request)
        self._first_tokens += 1
        self._first_token_s += request.waited_s
        self._count_if_late(request, is_refused=False)

    def unanswered(self, request: TrackedRequest, *, is_refused: bool) -> None:
        """Counts a request that ended without a first token."""
        self._unanswered.discard(request)
        self._count_if_late(request, is_refused=is_refused)

    def _count_if_late(self, request: TrackedRequest, *, is_refused: bool) -> None:
        if not request.is_late and (is_refused or request.waited_s > self._slo_ttft_s):
            request.is_late = True
            self._late += 1

    def load(self, stats: EngineStats) -> dict[str, float]:
        """Returns the engine's present load, and the totals counted so far. The keys are the field names of
        `ReplicaLoad` and `Counters` in `raytide.core.objects.endpoint_load`.
        """
        for request in self._unanswered:
            self._count_if_late(request, is_refused=False)
        return {
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "kv_use": 1.0 - stats.free_blocks / stats.num_blocks if stats.num_blocks else 0.0,
            "requests": float(self._requests),
            "prompt_tokens": float(stats.prompt_tokens - stats.cached_tokens),
            "output_tokens": float(stats.generated_tokens),
            "first_tokens": float(self._first_tokens),
            "first_token_s": self._first_token_s,
            "finished": float(stats.finished),
            "late": float(self._late),
        }


class TrackedRequest:
    """Measures one request's time to the first chunk, and reports it to the counters. As a context manager, it counts
    the request as ended if no chunk came before the exit. An exit with an OverloadedError counts as a refusal.
    """

    def __init__(self, counters: LoadCounters, began_s: float, new_tokens: int) -> None:
        self._counters, self._began_s, self.new_tokens = counters, began_s, new_tokens
        self._is_counted = False
        self.is_late = False
        """True once the request has been counted as late."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(is_refused=isinstance(error, OverloadedError))

    @property
    def waited_s(self) -> float:
        return time.perf_counter() - self._began_s

    def first_chunk(self) -> None:
        """Counts the request's first chunk. Later calls change nothing."""
        if not self._is_counted:
            self._is_counted = True
            self._counters.first_token(self)

    def end(self, *, is_refused: bool) -> None:
        """Counts that the request has ended before its first chunk. Does nothing if the first chunk has been
        counted.
        """
        if not self._is_counted:
            self._is_counted = True
            self._counters.unanswered(self, is_refused=is_refused)
