"""The number of processes that the kernel ended because memory ran out (OOM kills). The metric has the name that
Prometheus' node_exporter uses.

The count of the whole machine is in /proc/vmstat. https://docs.kernel.org/admin-guide/cgroup-v2.html describes the
same count for a container.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric

OOM_KILLS = "node_vmstat_oom_kill"
VMSTAT = Path("/proc/vmstat")


def oom_kills(vmstat: Path = VMSTAT) -> int | None:
    """Returns the number of OOM kills since the machine started. Returns None if the kernel does not report it (before
    Linux 4.13).
    """
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class KernelCollector:
    """A Prometheus collector that reads the number of OOM kills whenever the metrics page is read."""

    def __init__(self, vmstat: Path = VMSTAT) -> None:
        self._vmstat = vmstat

    def collect(self) -> Iterator[Metric]:
        if (count := oom_kills(self._vmstat)) is not None:
            family = Metric(OOM_KILLS, "Processes ended for lack of memory", "unknown")  # without `_total`, as there
            family.add_sample(OOM_KILLS, {}, count)
            yield family
