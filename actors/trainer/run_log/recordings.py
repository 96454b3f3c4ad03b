"""The types of profile: a trace of operators, a snapshot of a GPU's memory, and NVTX ranges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from raytide.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.profiler import profile

ROWS = 40
MOST_EVENTS = 1_000_000
"""The number of allocations and releases, the last ones, that a snapshot contains."""


class Recording:
    """The base class of the recordings. The constructor of a subclass starts a recording, `stop` ends it, and `write`
    writes its files. The methods of the base class do nothing.
    """

    suffixes: tuple[str, ...] = ()
    """The suffixes of the files that `write` writes."""

    def stop(self) -> None:
        """Ends the recording that the constructor started."""

    def write(self, stem: Path) -> None:
        """Writes the recording's files. Call it after `stop`. Raises OSError or RuntimeError."""


class OperatorTrace(Recording):
    suffixes = (".json", ".txt")

    def __init__(self, device: torch.device) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._running: profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._running.start()

    def stop(self) -> None:
        self._running.stop()

    def write(self, stem: Path) -> None:
        self._running.export_chrome_trace(f"{stem}.json")
        table = str(self._running.key_averages().table(sort_by=self._by, row_limit=ROWS))
        Path(f"{stem}.txt").write_text(f"{table}\n")


class MemorySnapshot(Recording):
    """A snapshot of the GPU's memory. It includes the allocations and releases between the constructor and `write`."""

    suffixes = (".pickle",)

    def __init__(self, device: torch.device) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)

    def write(self, stem: Path) -> None:
        try:
            torch.cuda.memory._dump_snapshot(f"{stem}.pickle")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


class NvtxRanges(Recording):
    """Marks operators with NVTX ranges, which Nsight Systems records."""

    def __init__(self, device: torch.device) -> None:
        self._ranges = torch.autograd.profiler.emit_nvtx()
        self._ranges.__enter__()

    def stop(self) -> None:
        self._ranges.__exit__(None, None, None)


RECORDINGS: dict[str, Callable[[torch.device], Recording]] = {
    "operators": OperatorTrace,
    "memory": MemorySnapshot,
    "nvtx": NvtxRanges,
}


def check_device(what: str, device: torch.device) -> None:
    """Raises ConfigError if the device does not support the recording `what`."""
    if what != "operators" and device.type != "cuda":
        raise ConfigError(f"profile.what {what} needs a GPU.", hint="Leave it out: operators are traced on any device.")
