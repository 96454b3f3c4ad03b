"""Bounds how fast one team fills the state store: records of jobs stay after their end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from raytide.core.errors import QuotaError
from raytide.core.objects.job import JobSpec

BURST_BYTES, BYTES_PER_H = 64 << 20, 32 << 20
"""What a team may add at once, and in each hour after that."""
MEMBER_BYTES = 250
"""The records of one member of a lease."""


class SubmissionRate:
    """One per API process: a bucket of bytes for each team, which time refills."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._left: dict[str, tuple[float, float]] = {}
        """Bytes and when they were counted, by team."""

    def take(self, spec: JobSpec) -> None:
        """Count a submission. QuotaError when its team has added too much of late."""
        members = max(shape.members for shape in spec.gang.shapes)
        size = len(spec.model_dump_json()) + MEMBER_BYTES * members
        now_s = self._now_s()
        with self._lock:
            left, at_s = self._left.get(spec.team, (float(BURST_BYTES), now_s))
            left = min(float(BURST_BYTES), left + (now_s - at_s) * BYTES_PER_H / 3600.0)
            is_enough = left >= size
            self._left[spec.team] = (left - size if is_enough else left, now_s)
        if not is_enough:
            wait_s = (size - left) * 3600.0 / BYTES_PER_H
            raise QuotaError(
                f"team {spec.team} has submitted too many or too large jobs: {BURST_BYTES >> 20} MiB at once and "
                f"{BYTES_PER_H >> 20} MiB an hour are stored.",
                hint=f"Try again in {wait_s:.0f} s, or send smaller ones: large texts belong into the job's package.",
            )
