"""The energy of this machine's CPU packages, from the kernel's RAPL counters. The metric has the name that Prometheus'
node_exporter uses.

https://docs.kernel.org/power/powercap/powercap.html describes the counters' files. A counter starts again at zero after
`max_energy_range_uj`. Virtual machines have no such counters, and on most systems only root may read them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily

RAPL_ENERGY = "node_rapl_package_joules_total"
POWERCAP = Path("/sys/class/powercap")


class RaplCollector:
    """A Prometheus collector for the joules that each CPU package has used since the start of this process.

    At full power, a counter wraps around after some minutes. The collector must be read more often than that.
    """

    def __init__(self, folder: Path = POWERCAP) -> None:
        zones = [zone for zone in sorted(folder.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        self._packages = [zone for zone in zones if _is_package(zone)]
        self._lock = threading.Lock()
        self._last: dict[Path, int] = {}
        self._joules: dict[Path, float] = {}
        for zone in self._packages:
            self._read(zone)

    @property
    def has_counters(self) -> bool:
        return bool(self._last)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields one metric family. Yields nothing if no counter can be read."""
        with self._lock:
            for zone in self._packages:
                self._read(zone)
            joules = dict(self._joules)
        if joules:
            help = "Energy of a CPU package, by the kernel's RAPL counter"
            family = CounterMetricFamily(RAPL_ENERGY.removesuffix("_total"), help, labels=("index", "path"))
            for zone, value in joules.items():
                family.add_metric((zone.name.partition(":")[2], zone.name), value)
            yield family

    def _read(self, zone: Path) -> None:
        try:
            now = int((zone / "energy_uj").read_text())
            turn = int((zone / "max_energy_range_uj").read_text())
        except (OSError, ValueError):
            return
        passed = now - self._last.get(zone, now)
        self._joules[zone] = self._joules.get(zone, 0.0) + (passed if passed >= 0 else passed + turn) / 1e6
        self._last[zone] = now


def _is_package(zone: Path) -> bool:
    """Returns False for the zone of the whole machine (`psys`), whose energy includes that of the packages."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return True
