"""Counts an engine's requests and the times of their first tokens, for raytide's controller."""

from __future__ import annotations

import time

from raytide.actors.engine.types import EngineStats


class LoadCounters:
    """Totals since the start. First tokens later than `slo_ttft_s`, and refused requests, are counted as late."""

    def __init__(self, slo_ttft_s: float | None) -> None:
        self._slo_ttft_s = slo_ttft_s or float("inf")
        self._requests = self._first_tokens = self._late = 0
        self._first_token_s = 0.0

    def track(self, waited_s: float) -> TrackedRequest:
        """Counts a request that has waited elsewhere for `waited_s`."""
        self._requests += 1
        return TrackedRequest(self, time.perf_counter() - waited_s)

    def first_token(self, seconds: float) -> None:
        self._first_tokens += 1
        self._first_token_s += seconds
        self._late += seconds > self._slo_ttft_s

    def unanswered(self, seconds: float, *, is_refused: bool) -> None:
        self._late += is_refused or seconds > self._slo_ttft_s

    def load(self, stats: EngineStats) -> dict[str, float]:
        """Returns the numbers by the names of `raytide.core.objects.endpoint_load.ReplicaLoad` and `Counters`."""
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
    """The time to the first chunk of one request."""

    def __init__(self, counters: LoadCounters, began_s: float) -> None:
        self._counters, self._began_s = counters, began_s
        self._is_answered = False

    def first_chunk(self) -> None:
        """Counts the first of a request's chunks; later ones change nothing."""
        if not self._is_answered:
            self._is_answered = True
            self._counters.first_token(time.perf_counter() - self._began_s)

    def end(self, *, is_refused: bool) -> None:
        """Counts a request that ended without its last chunk."""
        if not self._is_answered:
            self._counters.unanswered(time.perf_counter() - self._began_s, is_refused=is_refused)
