"""Metrics of GPUs, under the names and labels of NVIDIA's DCGM exporter.

Nodes with GPUs run raytide's exporter (`autoscaler/nodes/exporter`). Local nodes run a stand-in for it
(`autoscaler/providers/local/meter.py`). DCGM exposes its counters without `_total`, so they are declared as gauges
here.
"""

from raytide.core.telemetry.metrics import Metric

_LABELS = ("gpu", "UUID", "modelName", "Hostname", "node")


def _dcgm(name: str, help: str, unit: str = "") -> Metric:
    return Metric(f"DCGM_FI_DEV_{name}", "gauge", help, _LABELS, unit=unit)


SM_CLOCK = _dcgm("SM_CLOCK", "SM clock frequency in MHz", "megahertz")
GPU_TEMP = _dcgm("GPU_TEMP", "GPU temperature in C", "celsius")
POWER_USAGE = _dcgm("POWER_USAGE", "Power draw in W", "watts")
TOTAL_ENERGY = _dcgm("TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot in mJ", "millijoules")
GPU_UTIL = _dcgm("GPU_UTIL", "GPU utilization in percent", "percent")
XID_ERRORS = _dcgm("XID_ERRORS", "Value of the last XID error encountered")
FB_USED = _dcgm("FB_USED", "Frame buffer memory used in MiB", "mebibytes")
FB_FREE = _dcgm("FB_FREE", "Frame buffer memory free in MiB", "mebibytes")
UNCORRECTABLE_REMAPPED_ROWS = _dcgm("UNCORRECTABLE_REMAPPED_ROWS", "Number of rows remapped for uncorrectable errors")
ROW_REMAP_FAILURE = _dcgm("ROW_REMAP_FAILURE", "1 if remapping of rows has failed")
NVLINK_REPLAY_ERRORS = _dcgm("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVLink replays of all lanes")
NVLINK_RECOVERY_ERRORS = _dcgm("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "NVLink recoveries of all lanes")
NVLINKS = Metric("raytide_gpu_nvlinks", "gauge", "Active NVLinks of a GPU", _LABELS)
ECC_DBE = _dcgm("ECC_DBE_VOL_TOTAL", "Double-bit volatile ECC errors since the driver was loaded")
