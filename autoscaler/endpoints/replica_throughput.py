"""The speed of a replica on one node type. It is measured while requests wait for the replica, that is, at full load.

Each period of full load gives one measurement. An engine that stalls for a moment lowers a measurement. The estimate
is therefore the upper quartile of the latest measurements. There is no estimate before `ENOUGH` measurements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from raytide.autoscaler.endpoints.request_log import CounterDelta
from raytide.core.objects.endpoint import Speed
from raytide.core.objects.endpoint_load import Counters, ReplicaLoad

STRETCH_S = 30.0
ENOUGH, MOST = 3, 50
"""The number of stretches that an estimate needs, and the number of the latest stretches that are kept."""
UPPER = 0.75
LEAST_TPOT_S = 1e-5


@dataclass(frozen=True, slots=True)
class _Stretch:
    prompt_tps: float
    running: float
    """Mean number of running sequences."""
    tpot_s: float


@dataclass(slots=True)
class _Waiting:
    """One replica's counters since requests began to wait on it."""

    since_s: float
    counts: Counters = field(default_factory=Counters)
    running_s: float = 0.0
    """The sum over time of the running sequences, in sequence-seconds."""


@dataclass(slots=True)
class ThroughputMeter:
    """Measures the speed of one endpoint's replicas on one node type."""

    known: Speed | None = None
    """The speed that an earlier controller learned; used until `ENOUGH` stretches are measured."""
    stretches: deque[_Stretch] = field(default_factory=lambda: deque(maxlen=MOST))
    _waiting: dict[str, _Waiting] = field(default_factory=dict)

    def observe(self, delta: CounterDelta) -> None:
        replica = delta.replica
        if replica.waiting < 1:
            self._waiting.pop(replica.id, None)
            return
        now = self._waiting.setdefault(replica.id, _Waiting(delta.from_s))
        if replica.at_s < now.since_s:  # the clock was set back
            now = self._waiting[replica.id] = _Waiting(delta.from_s)
        now.counts = now.counts.plus(delta.delta)
        now.running_s += replica.running * (replica.at_s - delta.from_s)
        seconds, counts = replica.at_s - now.since_s, now.counts
        if seconds >= STRETCH_S and counts.finished * seconds >= now.running_s and counts.output_tokens > 0:
            self._end(seconds, now)
            del self._waiting[replica.id]

    def retain(self, replicas: Iterable[ReplicaLoad]) -> None:
        """Drops the unfinished measurements of replicas that are not in `replicas`, because those replicas have
        ended.
        """
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
        """Ends a stretch in which every slot was used. One sequence is assumed to be in prefill all the time, so that
        the measured speed does not predict more requests than the stretch had.
        """
        counts, running = waiting.counts, waiting.running_s / seconds
        if counts.prompt_tokens > 0:
            tpot_s = max((running - 1.0) * seconds / counts.output_tokens, LEAST_TPOT_S)
            self.stretches.append(_Stretch(counts.prompt_tokens / seconds, running, tpot_s))
