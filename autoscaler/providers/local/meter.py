"""The fake GPU exporter of a local node. It shows Ray's metric of GPU use, and the metrics of NVIDIA's DCGM exporter
under their own names.

It is needed because all local nodes share one machine, so the Ray agent of every node measures the same values.
`set_use` sets the utilization of the node's GPUs, which is zero at first. `set_gpu` sets the GPUs' other values. Any
process may call these functions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from raytide.autoscaler.providers.local.files import LocalMachine, NodeFolder
from raytide.core.config import Config
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.objects.node import ACCELERATOR_LABEL
from raytide.core.telemetry.catalogue import gpu as dcgm
from raytide.core.telemetry.metrics import Metric

_MEMORY_MIB = 80 * 1024
_IDLE_W, _MOST_W = 60.0, 400.0
"""The power of an A100-like board, idle and in full use."""
_IDLE_C, _MOST_C = 35.0, 70.0
_IDLE_MHZ, _MOST_MHZ = 210.0, 1410.0
_USE, _SETTINGS = "use.json", "gpu.json"


class GpuSettings(Config):
    """The values that `set_gpu` sets for every GPU of a node. A value of None is derived from the GPU's utilization."""

    temperature_c: float | None = None
    power_w: float | None = None
    memory_used_mib: float = 0.0
    xid: float = 0.0
    """The last XID error; 0 for none."""
    ecc_errors: float = 0.0
    """Double-bit errors since the driver was loaded."""
    remapped_rows: float = 0.0
    """Rows remapped for uncorrectable errors."""
    remap_failed: bool = False
    nvlinks: float = 12.0
    """Active NVLinks."""
    nvlink_recoveries: float = 0.0
    """Recoveries of the links since the driver was loaded."""


def start_meter(folder: NodeFolder, purchase: LocalMachine) -> str:
    """Serves the node's metrics page from a thread of this process, and returns its `host:port`."""
    registry = CollectorRegistry()
    registry.register(_Gpus(folder, purchase))
    server, _ = start_http_server(0, addr=purchase.address, registry=registry)
    return f"{purchase.address}:{server.server_port}"


def set_use(run_dir: Path, node_id: str, gpu: float | None) -> None:
    """Sets the utilization of each GPU of the node. None removes all metrics of the node's GPUs."""
    write_json(run_dir / "nodes" / node_id / _USE, {"gpu": gpu})


def set_gpu(run_dir: Path, node_id: str, settings: GpuSettings) -> None:
    """Sets metrics of each GPU of the node, such as the count of ECC errors. The utilization cannot be set."""
    write_json(run_dir / "nodes" / node_id / _SETTINGS, settings.model_dump())


class _Gpus:
    def __init__(
        self, folder: NodeFolder, purchase: LocalMachine, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self._monotonic_s = folder, monotonic_s
        self._gpus = int(purchase.resources["GPU"])
        self._model = purchase.labels.get(ACCELERATOR_LABEL, "stand-in")
        self._lock = threading.Lock()
        self._energy_mj, self._at_s, self._power_w = 0.0, monotonic_s(), _IDLE_W

    def collect(self) -> Iterable[GaugeMetricFamily]:
        use = (read_json(self._folder.path / _USE) or {"gpu": 0.0})["gpu"]
        if use is None:
            return
        settings = GpuSettings.model_validate(read_json(self._folder.path / _SETTINGS) or {})
        family = GaugeMetricFamily(
            "ray_node_gpus_utilization", "Percent of its time that a GPU works", labels=("ip", "GpuIndex")
        )
        for gpu in range(self._gpus):
            family.add_metric((self._folder.node_id, str(gpu)), 100.0 * use)
        yield family
        power_w = _between(_IDLE_W, _MOST_W, use) if settings.power_w is None else settings.power_w
        temperature_c = settings.temperature_c
        values = {
            dcgm.SM_CLOCK: _between(_IDLE_MHZ, _MOST_MHZ, use),
            dcgm.GPU_TEMP: _between(_IDLE_C, _MOST_C, use) if temperature_c is None else temperature_c,
            dcgm.POWER_USAGE: power_w,
            dcgm.TOTAL_ENERGY: self._energy(power_w),
            dcgm.GPU_UTIL: 100.0 * use,
            dcgm.XID_ERRORS: settings.xid,
            dcgm.FB_USED: settings.memory_used_mib,
            dcgm.FB_FREE: _MEMORY_MIB - settings.memory_used_mib,
            dcgm.UNCORRECTABLE_REMAPPED_ROWS: settings.remapped_rows,
            dcgm.ROW_REMAP_FAILURE: float(settings.remap_failed),
            dcgm.ECC_DBE: settings.ecc_errors,
            dcgm.NVLINKS: settings.nvlinks,
            dcgm.NVLINK_REPLAY_ERRORS: 0.0,
            dcgm.NVLINK_RECOVERY_ERRORS: settings.nvlink_recoveries,
        }
        yield from (self._family(metric, value) for metric, value in values.items())

    def _family(self, metric: Metric, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        node = self._folder.node_id
        for gpu in range(self._gpus):
            family.add_metric((str(gpu), f"GPU-{node}-{gpu}", self._model, node, node), value)
        return family

    def _energy(self, power_w: float) -> float:
        """Returns the millijoules that one GPU has used so far; its power since the last reading is assumed to be that
        of the last reading.
        """
        with self._lock:
            now_s = self._monotonic_s()
            self._energy_mj += 1000.0 * self._power_w * (now_s - self._at_s)
            self._at_s, self._power_w = now_s, power_w
            return self._energy_mj


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
