"""Limits the bytes that one team may add to the state store: the bytes added at once, and the bytes added per hour.

The limit exists because a job's records stay after the job ends, and each change leaves an entry in the audit log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from raytide.core.errors import QuotaError
from raytide.core.objects.job import JobSpec

BURST_BYTES, BYTES_PER_H = 64 << 20, 32 << 20
"""The bytes that a team may add at once, and per hour."""
MEMBER_BYTES = 250
"""The size of the records of one lease member."""
CHANGE_BYTES = 2000
"""The size of an API key, or of an entry of the audit log."""


class SubmissionRate:
    """The token buckets of one API process: one bucket for each team, counted in bytes."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}
        """The bytes left and the time of counting, by team."""

    def take(self, spec: JobSpec) -> None:
        """Charges the team for the bytes of a submitted job. Raises QuotaError if the team has exceeded its rate."""
        members = max(shape.members for shape in spec.gang.shapes)
        self._take(spec.team, len(spec.model_dump_json()) + MEMBER_BYTES * members)

    def take_change(self, team: str, size: int = 0) -> None:
        """Charges the team for a change: an entry of the audit log, and `size` bytes in other tables. Raises QuotaError
        if the team has exceeded its rate."""
        self._take(team, CHANGE_BYTES + size)

    def _take(self, team: str, size: int) -> None:
        now_s = self._now_s()
        with self._lock:
            left, at_s = self._left.get(team, (float(BURST_BYTES), now_s))
            left = min(float(BURST_BYTES), left + (now_s - at_s) * BYTES_PER_H / 3600.0)
            is_enough = left >= size
            self._left[team] = (left - size if is_enough else left, now_s)
        if not is_enough:
            wait_s = (size - left) * 3600.0 / BYTES_PER_H
            raise QuotaError(
                f"team {team} exceeds its submission rate; the limit is {BURST_BYTES >> 20} MiB at once and "
                f"{BYTES_PER_H >> 20} MiB an hour.",
                hint=f"Try again in {wait_s:.0f} s, or send smaller specs: put large texts into the job's package.",
            )
