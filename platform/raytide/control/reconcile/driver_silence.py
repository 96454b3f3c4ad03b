"""How long the drivers of gangs have not asked for their leases, counted look by look.

A heartbeat is a time by the API's clock. It is only ever compared with the one before: whether it changed says that the
driver lives, and no step of any clock makes it look dead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raytide.core.objects.job import Job, JobKind

__all__ = ["HUNG_UP_S", "DriverSilence"]

HUNG_UP_S = 4.0
"""How long a driver that hung up without an answer is waited for: see `hung_up`."""
_LOOKS = 3
"""The fewest looks that a whole silence consists of: while nobody looked (the controller was paused, or its machine),
nobody could be heard."""


def hung_up(heartbeat_at_s: float | None, now_s: float, timeout_s: float) -> float:
    """The heartbeat of a driver that vanished while it waited for an answer: an earlier one than it had, so that only a
    moment is left of its time."""
    told_s = now_s - timeout_s + min(HUNG_UP_S, timeout_s)
    return told_s if heartbeat_at_s is None else min(told_s, heartbeat_at_s - 1e-3)


@dataclass(frozen=True, slots=True)
class _Heard:
    heartbeat_at_s: float
    silent_s: float


class DriverSilence:
    """`observe` at every look; `forget` when what was observed could not be acted upon."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._looked_s: float | None = None

    def observe(self, jobs: Iterable[Job], now_s: float) -> Mapping[str, float]:
        """By gang, for how long its driver has been silent while it could be heard."""
        passed_s = 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        self._looked_s = now_s
        gangs = [job for job in jobs if job.spec.kind is JobKind.GANG and not job.is_final]
        self._heard = {job.id: _after(self._heard.get(job.id), job, passed_s) for job in gangs}
        return {job_id: heard.silent_s for job_id, heard in self._heard.items()}

    def forget(self) -> None:
        """Every driver has its whole time again: it could not make itself heard, or not be listened to."""
        self._heard, self._looked_s = {}, None


def _after(before: _Heard | None, job: Job, passed_s: float) -> _Heard:
    heartbeat_at_s = -math.inf if job.heartbeat_at_s is None else job.heartbeat_at_s
    timeout_s = job.spec.heartbeat_timeout_s
    if before is None or heartbeat_at_s > before.heartbeat_at_s:
        return _Heard(heartbeat_at_s, 0.0)
    silent_s = before.silent_s + min(passed_s, timeout_s / _LOOKS)
    if heartbeat_at_s < before.heartbeat_at_s:  # it hung up, or the API started anew with an earlier clock
        silent_s = max(silent_s, timeout_s - min(HUNG_UP_S, timeout_s))
    return _Heard(heartbeat_at_s, silent_s)
