"""The kernel's count of processes that it ended for lack of memory, as Prometheus' node_exporter names it.

https://docs.kernel.org/admin-guide/cgroup-v2.html has the same count for a container; /proc/vmstat has the machine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

OOM_KILLS = "node_vmstat_oom_kill"
VMSTAT = Path("/proc/vmstat")


def oom_kills(vmstat: Path = VMSTAT) -> int | None:
    """Returns the count since the machine started; None where the kernel does not report it (before Linux 4.13)."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class KernelCollector:
    """Collects the count at each read of the page."""

    def __init__(self, vmstat: Path = VMSTAT) -> None:
        self._vmstat = vmstat

    def collect(self) -> Iterator[Metric]:
        if (count := oom_kills(self._vmstat)) is not None:
            family = Metric(OOM_KILLS, "Processes ended for lack of memory", "unknown")  # without `_total`, as there
            family.add_sample(OOM_KILLS, {}, count)
            yield family
