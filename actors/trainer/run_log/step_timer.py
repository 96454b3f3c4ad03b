"""Times the phases of a step without waiting for the device."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


class StepTimer:
    """Measures laps. A lap is the time between two marks. It is measured by the host's clock on a CPU, and by the
    device's clock on a GPU.

    On a GPU the host runs ahead. If the kernels of a lap still run when `drain_times` is called, the lap counts
    towards the next step. Over a run, this evens out.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last = self._mark()
        self._open: list[tuple[str, Mark, Mark]] = []

    def start(self) -> None:
        """Sets a mark. The time since the last mark counts towards no phase."""
        self._last = self._mark()

    def lap(self, phase: str) -> None:
        """Sets a mark, and counts the time since the previous mark towards `phase`."""
        now = self._mark()
        self._open.append((phase, self._last, now))
        self._last = now

    def drain_times(self) -> dict[str, float]:
        """Returns the seconds of each phase, summed over the laps that completed since the last call. A lap that is
        still running is counted in a later call.
        """
        times: dict[str, float] = {}
        still = []
        for phase, begin, end in self._open:
            seconds = _between(begin, end)
            if seconds is None:
                still.append((phase, begin, end))
            else:
                times[phase] = times.get(phase, 0.0) + seconds
        self._open = still
        return times

    def _mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: Mark, end: Mark) -> float | None:
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float)
        return end - begin
    return begin.elapsed_time(end) / 1e3 if end.query() else None
