"""Measures, by the controller's clock, for how long the driver of each gang has not polled its lease.

The API's clock sets the heartbeat times. So the controller only compares the time of each heartbeat with the time of
the previous heartbeat, and a step of a clock cannot make a live driver look dead. If the two times differ, the
driver is alive, unless the later time is negative. A negative time records that the driver disconnected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raytide.core.objects.job import Job, JobKind

DISCONNECT_GRACE_S = 4.0
"""The time that a driver has left after it disconnected from a pending poll."""
_MIN_OBSERVATIONS = 3
"""The fewest observations in a timeout, so that a pause of the controller or machine does not count as the driver's
silence.
"""


def disconnected_heartbeat_s(now_s: float) -> float:
    """Returns the heartbeat time to store for a driver that disconnected during a pending poll.

    The time is negative. Once the controller has read this time, the driver has at most DISCONNECT_GRACE_S left.
    """
    return -max(1.0, now_s)


@dataclass(frozen=True, slots=True)
class _Silence:
    heartbeat_at_s: float
    silent_s: float


class DriverSilence:
    """The silences of the drivers of all gangs. Call `observe` on every tick, and `forget` after a tick that could not
    act."""

    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}
        self._observed_s: float | None = None

    def observe(self, jobs: Iterable[Job], now_s: float) -> Mapping[str, float]:
        """Returns a mapping from job id to the seconds for which the gang's driver has been silent."""
        passed_s = 0.0 if self._observed_s is None else max(0.0, now_s - self._observed_s)
        self._observed_s = now_s
        gangs = [job for job in jobs if job.spec.kind is JobKind.GANG and not job.is_final]
        self._silences = {job.id: _after(self._silences.get(job.id), job, passed_s) for job in gangs}
        return {job_id: heard.silent_s for job_id, heard in self._silences.items()}

    def forget(self) -> None:
        """Resets all silences to zero. Call it if drivers could not reach the API, or if the controller could not store
        heartbeats."""
        self._silences, self._observed_s = {}, None


def _after(before: _Silence | None, job: Job, passed_s: float) -> _Silence:
    heartbeat_at_s = -math.inf if job.heartbeat_at_s is None else job.heartbeat_at_s
    timeout_s = job.spec.heartbeat_timeout_s
    if before is None or (heartbeat_at_s != before.heartbeat_at_s and heartbeat_at_s >= 0):
        return _Silence(heartbeat_at_s, 0.0)
    silent_s = before.silent_s + min(passed_s, timeout_s / _MIN_OBSERVATIONS)
    if heartbeat_at_s != before.heartbeat_at_s:  # it disconnected
        silent_s = max(silent_s, timeout_s - min(DISCONNECT_GRACE_S, timeout_s))
    return _Silence(heartbeat_at_s, silent_s)
