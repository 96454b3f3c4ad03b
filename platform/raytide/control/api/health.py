"""Detects problems of the control plane: a full disk, a failing store, a stalled controller."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raytide.control.views import Live, from_json
from raytide.core.clock import Clock
from raytide.core.state import Store

LOW_BYTES, LOW_FILES = 64 << 20, 100
"""Below this free space the run folder's disk counts as full, so that records and logs can still grow during a
cleanup."""
_FAILED_S = 60.0
"""The age up to which a failed write is reported if no other write was tried."""
_STILL_S = 30.0
"""A controller without a finished tick for this long counts as stalled; ticks of the largest clusters take seconds."""


@dataclass(frozen=True, slots=True)
class ControlPlaneHealth:
    code: str
    """`disk`, `store` or `controller`; shown by `/health`, which needs no token."""
    text: str


class HealthMonitor:
    """Checks the run folder, the store and the controller's live.json each time it is asked."""

    def __init__(
        self, live_path: Path, store: Store, clock: Clock, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._live_path, self._store, self._clock, self._monotonic_s = live_path, store, clock, monotonic_s
        self._live = Live(at_s=0.0)
        self._changed_s: float | None = None

    def live(self) -> Live:
        """Returns the content of the controller's live.json. It is empty before the controller's first tick.

        If the file cannot be read, returns the content of the last successful read.
        """
        try:
            live = from_json(Live, json.loads(self._live_path.read_text()))
        except FileNotFoundError:
            return Live(at_s=0.0)
        except (OSError, ValueError, TypeError, KeyError):
            return self._live
        if live.at_s != self._live.at_s:
            if self._changed_s is None and live.at_s:
                self._changed_s = self._monotonic_s() - max(0.0, self._clock.now_s() - live.at_s)
            else:
                self._changed_s = self._monotonic_s()
        self._live = live
        return live

    def controller_age_s(self) -> float | None:
        """Returns the seconds since the controller's last tick, or None if it has never ticked.

        The last change of live.json counts as the last tick, because the controller's clock may differ from ours.
        """
        self.live()
        return None if self._changed_s is None else self._monotonic_s() - self._changed_s

    def free_bytes(self) -> int:
        """Returns the bytes that this user can still write to the disk of the run folder."""
        found = os.statvfs(self._live_path.parent)
        return found.f_bavail * found.f_frsize

    def troubles(self) -> tuple[ControlPlaneHealth, ...]:
        return tuple(found for found in (self._disk(), self._writes(), self._controller()) if found is not None)

    def _disk(self) -> ControlPlaneHealth | None:
        found, folder = os.statvfs(self._live_path.parent), self._live_path.parent
        if found.f_bavail * found.f_frsize < LOW_BYTES:
            left = f"{found.f_bavail * found.f_frsize / 2**20:.1f} MiB"
        elif found.f_files and found.f_favail < LOW_FILES:
            left = f"space for {found.f_favail} more files"
        else:
            return None
        return ControlPlaneHealth(
            "disk",
            f"the disk of {folder} has {left} left: free space there; accepted records are kept, and what cannot be "
            "stored is refused until then.",
        )

    def _writes(self) -> ControlPlaneHealth | None:
        failed = self._store.last_failure()
        if failed is None or failed.age_s > _FAILED_S:
            return None
        return ControlPlaneHealth("store", f"a write failed {failed.age_s:.0f} s ago: {failed.text}")

    def _controller(self) -> ControlPlaneHealth | None:
        age_s = self.controller_age_s()
        if age_s is None or age_s <= _STILL_S:
            return None
        return ControlPlaneHealth(
            "controller", f"the controller has not ticked for {age_s:.0f} s: see logs/controller.log."
        )
