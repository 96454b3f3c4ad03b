"""What one replica does on one type of node, learned while requests waited on it: then it does all that it can.

Of each stretch of waiting the rates are kept, and the upper quartile of the last ones counts: an engine that stood
still for a moment was not at work. Nothing is said before `ENOUGH` stretches were seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from raytide.autoscaler.endpoints.request_log import CounterDelta
from raytide.core.objects.endpoint import Counters, ReplicaLoad, Speed

STRETCH_S = 30.0
ENOUGH, MOST = 3, 50
"""Stretches: so many must have been seen, so many of the last are remembered."""
UPPER = 0.75
LEAST_TPOT_S = 1e-5


@dataclass(frozen=True, slots=True)
class _Stretch:
    prompt_tps: float
    running: float
    """Sequences side by side, on average."""
    tpot_s: float


@dataclass(slots=True)
class _Waiting:
    """One replica, since requests wait on it."""

    since_s: float
    counted: Counters = field(default_factory=Counters)
    running_s: float = 0.0
    """Sum over the sequences."""


@dataclass(slots=True)
class ThroughputMeter:
    """Of one endpoint on one type of node."""

    known: Speed | None = None
    """As another controller learned it; until there is enough of our own."""
    stretches: deque[_Stretch] = field(default_factory=lambda: deque(maxlen=MOST))
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def observe(self, word: CounterDelta) -> None:
        replica = word.replica
        if replica.waiting < 1:
            self._waiting.pop(replica.id, None)
            return
        now = self._waiting.setdefault(replica.id, _Waiting(word.from_s))
        if replica.at_s < now.since_s:  # the clock was set back
            now = self._waiting[replica.id] = _Waiting(word.from_s)
        now.counted = now.counted.plus(word.delta)
        now.running_s += replica.running * (replica.at_s - word.from_s)
        seconds, counted = replica.at_s - now.since_s, now.counted
        if seconds >= STRETCH_S and counted.finished * seconds >= now.running_s and counted.output_tokens > 0:
            self._end(seconds, now)
            del self._waiting[replica.id]

    def retain(self, replicas: Iterable[ReplicaLoad]) -> None:
        """Who went while requests waited on it will not say that they no longer do."""
        ids = {replica.id for replica in replicas}
        self._waiting = {id: waiting for id, waiting in self._waiting.items() if id in ids}

    @property
    def speed(self) -> Speed | None:
        if len(self.stretches) < ENOUGH:
            return self.known
        seen = self.stretches
        return Speed(
            prefill_tps=float(np.quantile([stretch.prompt_tps for stretch in seen], UPPER)),
            slots=max(1, round(float(np.quantile([stretch.running for stretch in seen], UPPER)))),
            tpot_ms=1e3 * float(np.median([stretch.tpot_s for stretch in seen])),
        )

    def _end(self, seconds: float, waiting: _Waiting) -> None:
        """Every slot had its turn. One of the sequences is taken to be in its prefill all the time, so that the speed
        explains the requests of this stretch, not more of them."""
        counted, running = waiting.counted, waiting.running_s / seconds
        if counted.prompt_tokens > 0:
            tpot_s = max((running - 1.0) * seconds / counted.output_tokens, LEAST_TPOT_S)
            self.stretches.append(_Stretch(counted.prompt_tokens / seconds, running, tpot_s))
