"""The metrics of this machine's GPUs as NVIDIA's driver reports them (NVML), under the names of the DCGM exporter.

https://docs.nvidia.com/deploy/nvml-api/ describes the functions. Values that a GPU does not have, such as ECC on a
consumer board, are left out. The utilization of a GPU that the driver has lost is NaN.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import pynvml
from prometheus_client.core import GaugeMetricFamily

from raytide.core.logs import logger
from raytide.core.telemetry.catalogue import gpu as dcgm
from raytide.core.telemetry.metrics import Metric

_EVENT_WAIT_MS = 5_000
_RETRY_S = 30.0
_MIB = 2**20

log = logger(__name__)

Values = Mapping[Metric, float]
T = TypeVar("T")


class GpuCollector:
    """A Prometheus collector that reads the metrics of all GPUs at each scrape.

    A thread waits for XID errors, which the driver reports as events. The constructor raises pynvml.NVMLError if there
    is no driver.
    """

    def __init__(self, node_id: str, host: str) -> None:
        pynvml.nvmlInit()
        self._node_id, self._host = node_id, host
        self._devices: list[Any] = []
        self._uuids: list[str] = []
        self._names: list[tuple[str, str]] = []
        """The number and the model of each GPU."""
        self._unknown: list[str] = []
        """The numbers of the GPUs that the driver refuses, as those that have left the bus."""
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid, model = pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetName(device)
            except pynvml.NVMLError as error:  # the others are measured
                log.error("a GPU cannot be measured", extra={"gpu": index, "error": str(error)})
                self._unknown.append(str(index))
                continue
            self._devices.append(device)
            self._uuids.append(uuid)
            self._names.append((str(index), model))
        self._xids: dict[str, float] = {}
        """The last XID error by UUID."""
        threading.Thread(target=self._watch_xids, name="xids", daemon=True).start()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the metric families of all GPUs."""
        families: dict[Metric, GaugeMetricFamily] = {}
        for device, uuid, (index, model) in zip(self._devices, self._uuids, self._names, strict=True):
            values = {dcgm.XID_ERRORS: self._xids.get(uuid, 0.0), **_values(device)}
            for metric, value in values.items():
                family = families.setdefault(metric, GaugeMetricFamily(metric.name, metric.help, labels=metric.labels))
                family.add_metric((index, uuid, model, self._host, self._node_id), value)
        use = dcgm.GPU_UTIL
        for index in self._unknown:  # work may be running there
            family = families.setdefault(use, GaugeMetricFamily(use.name, use.help, labels=use.labels))
            family.add_metric((index, "", "", self._host, self._node_id), math.nan)
        yield from families.values()

    def _watch_xids(self) -> None:
        events, uuids = pynvml.nvmlEventSetCreate(), dict(zip(map(_address, self._devices), self._uuids, strict=True))
        for device, uuid in zip(self._devices, self._uuids, strict=True):
            try:
                pynvml.nvmlDeviceRegisterEvents(device, pynvml.nvmlEventTypeXidCriticalError, events)
            except pynvml.NVMLError as error:
                log.warning("XID errors cannot be watched", extra={"gpu": uuid, "error": str(error)})
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(events, _EVENT_WAIT_MS)
            except pynvml.NVMLError_Timeout:
                continue
            except pynvml.NVMLError as error:  # the other GPUs are watched on
                log.warning("XID errors cannot be read", extra={"error": str(error)})
                time.sleep(_RETRY_S)
                continue
            uuid = uuids.get(_address(event.device), "")  # the driver does not tell the UUID of a GPU that it has lost
            log.error("XID error", extra={"gpu": uuid, "xid": event.eventData})
            self._xids[uuid] = float(event.eventData)


def _address(device: Any) -> int | None:
    """Returns what a handle points to, which is the same for all handles of a GPU."""
    return ctypes.cast(device, ctypes.c_void_p).value


def _values(device: Any) -> Values:
    """Returns the metrics of one GPU. If the driver cannot tell the GPU's use, it is NaN, since work may be running
    there.
    """
    found = {metric: value for metric, read in _READS.items() if (value := _try(read, device)) is not None}
    several = (_try(_memory, device), _try(_remapped_rows, device), _nvlinks(device))
    return {
        dcgm.GPU_UTIL: math.nan,
        **found,
        **{metric: value for each in several for metric, value in (each or {}).items()},
    }


def _memory(device: Any) -> Values:
    memory = pynvml.nvmlDeviceGetMemoryInfo(device)
    return {dcgm.FB_USED: memory.used / _MIB, dcgm.FB_FREE: memory.free / _MIB}


def _remapped_rows(device: Any) -> Values:
    _, uncorrectable, _, has_failed = pynvml.nvmlDeviceGetRemappedRows(device)
    return {dcgm.UNCORRECTABLE_REMAPPED_ROWS: float(uncorrectable), dcgm.ROW_REMAP_FAILURE: float(has_failed)}


def _nvlinks(device: Any) -> Values:
    """Returns the number of active links and the sums of their errors; nothing for a GPU without links."""
    links: list[int] = []
    """The state of each link. The driver refuses the first one that the GPU does not have."""
    while (state := _try_link(pynvml.nvmlDeviceGetNvLinkState, device, len(links))) is not None:
        links.append(state)
    if not links:
        return {}
    found = {dcgm.NVLINKS: float(links.count(pynvml.NVML_FEATURE_ENABLED))}
    for metric, kind in _LINK_ERRORS.items():
        counts = [_try_link(pynvml.nvmlDeviceGetNvLinkErrorCounter, device, link, kind) for link in range(len(links))]
        if known := [count for count in counts if count is not None]:
            found[metric] = float(sum(known))
    return found


def _try_link(read: Callable[..., int], device: Any, link: int, *more: int) -> int | None:
    if link >= pynvml.NVML_NVLINK_MAX_LINKS:
        return None
    return _try(lambda each: read(each, link, *more), device)


_LINK_ERRORS: Mapping[Metric, int] = {
    dcgm.NVLINK_REPLAY_ERRORS: pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    dcgm.NVLINK_RECOVERY_ERRORS: pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
}
_READS: Mapping[Metric, Callable[[Any], float]] = {
    dcgm.SM_CLOCK: lambda device: float(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)),
    dcgm.GPU_TEMP: lambda device: float(pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU)),
    dcgm.POWER_USAGE: lambda device: pynvml.nvmlDeviceGetPowerUsage(device) / 1000.0,
    dcgm.TOTAL_ENERGY: lambda device: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device)),
    dcgm.GPU_UTIL: lambda device: float(pynvml.nvmlDeviceGetUtilizationRates(device).gpu),
    dcgm.ECC_DBE: lambda device: float(
        pynvml.nvmlDeviceGetTotalEccErrors(device, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    ),
}


def _try(read: Callable[[Any], T], device: Any) -> T | None:
    """Returns the result of the driver call; None if this GPU or this driver does not support it."""
    try:
        return read(device)
    except pynvml.NVMLError:
        return None
