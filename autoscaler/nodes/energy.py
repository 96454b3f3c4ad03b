"""The energy that nodes have used, computed from the readings of their machines."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from raytide.core.objects.node import NodeReading

NVML, RAPL, ESTIMATE = "nvml", "rapl", "estimate"
"""The sources of energy values: the GPUs as their driver measures them; the CPUs by their own counters; and, where
there are no such counters, an estimate from the CPU-seconds that were used.
"""

_LONGEST_GAP_S = 60.0
"""The longest time for which one power reading is assumed to hold without a newer one."""


class EnergyMeter:
    """The energy used since the start of this process, in joules by node and source.

    Some sources count energy. For the others, the power of a reading is assumed to hold until the next reading. The
    meter is safe to share between threads.
    """

    def __init__(self, watts_per_core: float = 0.0) -> None:
        self._watts_per_core = watts_per_core
        self._lock = threading.Lock()
        self._last: dict[str, NodeReading] = {}
        self._joules: dict[str, dict[str, float]] = {}
        self._cpu_power_w: dict[str, float] = {}
        """The last power in watts of each node's CPUs, from their own counters."""
        self._booked_mj: dict[str, int] = {}

    def add(self, node_id: str, reading: NodeReading) -> None:
        """Adds the energy that the node has used since its previous reading."""
        with self._lock:
            before = self._last.get(node_id)
            self._last[node_id] = reading
            if before is None or reading.at_s <= before.at_s:
                return
            seconds = min(reading.at_s - before.at_s, _LONGEST_GAP_S)
            joules = self._joules.setdefault(node_id, {})
            if (gpus := _gpu_joules(before, reading, seconds)) is not None:
                joules[NVML] = joules.get(NVML, 0.0) + gpus
            if (cpus := _risen(before.cpu_energy_j, reading.cpu_energy_j)) is not None:
                joules[RAPL] = joules.get(RAPL, 0.0) + cpus
                self._cpu_power_w[node_id] = cpus / (reading.at_s - before.at_s)
                return
            self._cpu_power_w.pop(node_id, None)
            if before.cores_used is not None:
                joules[ESTIMATE] = joules.get(ESTIMATE, 0.0) + self._watts_per_core * before.cores_used * seconds

    def joules(self) -> Mapping[str, Mapping[str, float]]:
        with self._lock:
            return {node_id: dict(sources) for node_id, sources in self._joules.items()}

    def power_w(self, node_id: str, reading: NodeReading) -> Mapping[str, float]:
        """Returns the power of a node in watts by source, according to this reading."""
        cores, cpus = reading.cores_used, self._cpu_power_w.get(node_id)
        found: dict[str, float | None] = {
            NVML: reading.gpu_power_w,
            RAPL: cpus,
            ESTIMATE: None if cores is None or cpus is not None else self._watts_per_core * cores,
        }
        return {source: watts for source, watts in found.items() if watts is not None}

    def pending_mj(self) -> dict[str, int]:
        """Returns, for each node, the energy in millijoules that is not booked in the ledger yet."""
        return {
            node_id: int(1000.0 * sum(joules.values())) - self._booked_mj.get(node_id, 0)
            for node_id, joules in self.joules().items()
        }

    def settle(self, booked_mj: Mapping[str, int], closed: Iterable[str] = ()) -> None:
        """Records that energy was booked. `booked_mj` has the booked millijoules by node. Forgets the nodes in
        `closed`, for which no more energy is booked.
        """
        with self._lock:
            for node_id, amount in booked_mj.items():
                self._booked_mj[node_id] = self._booked_mj.get(node_id, 0) + amount
            for node_id in closed:
                for kept in (self._last, self._joules, self._cpu_power_w, self._booked_mj):
                    kept.pop(node_id, None)


def _gpu_joules(before: NodeReading, now: NodeReading, seconds: float) -> float | None:
    if (risen := _risen(before.gpu_energy_j, now.gpu_energy_j)) is not None:
        return risen
    return None if before.gpu_power_w is None else before.gpu_power_w * seconds


def _risen(before: float | None, now: float | None) -> float | None:
    """Returns the increase of a counter; None if one of the values is unknown or the counter was reset."""
    return now - before if before is not None and now is not None and now >= before else None
