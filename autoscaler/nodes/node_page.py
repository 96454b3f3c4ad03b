"""Reads the metrics pages of Ray's agent and of the exporters, in Prometheus' text format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from email.utils import parsedate_to_datetime

from prometheus_client.parser import text_string_to_metric_families

from raytide.autoscaler.nodes.exporter.kernel import OOM_KILLS
from raytide.autoscaler.nodes.exporter.rapl import RAPL_ENERGY
from raytide.core.objects.node import Meter, NodeReading, Signal
from raytide.core.telemetry.catalogue.gpu import GPU_UTIL, POWER_USAGE, TOTAL_ENERGY

_METERS: Mapping[str, Meter] = {
    "ray_node_cpu_utilization": "cpu",
    "ray_node_gpus_utilization": "gpu",
    GPU_UTIL.name: "gpu",
}
"""The meters by the metric names of Ray's agent and of exporters; their values are in percent."""
_READ = (
    *_METERS,
    "ray_node_cpu_count",
    "ray_node_mem_used",
    "ray_node_mem_total",
    "ray_node_disk_usage",
    "ray_node_disk_free",
    "ray_node_disk_io_read_speed",
    "ray_node_disk_io_write_speed",
    "ray_node_network_receive_speed",
    "ray_node_network_send_speed",
    "ray_node_gpu_power_milliwatts",
    POWER_USAGE.name,
    TOTAL_ENERGY.name,
    RAPL_ENERGY,
    OOM_KILLS,
)
CLOCK_SKEW = "clock_skew"
"""The name under which the reader of pages adds the skew to the samples of a page."""
PageSamples = Mapping[str, list[tuple[float, float]]]
"""(value, time) of each series by its metric."""


def read_page(page: str, now_s: float) -> PageSamples:
    """Returns those samples of a page that this module uses. Raises ValueError if the text is not in Prometheus'
    format.
    """
    lines = [line for line in page.splitlines() if line.startswith(_READ)]  # a page has hundreds of others
    found: dict[str, list[tuple[float, float]]] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            at_s = now_s if sample.timestamp is None else float(sample.timestamp)
            found.setdefault(sample.name, []).append((sample.value, at_s))
    return found


def meters_of(samples: PageSamples) -> dict[Meter, Signal]:
    """Returns the meters (the use of CPU and GPU) on a page. With several GPUs, the value of the busiest GPU counts.

    If the value of any GPU is NaN (a failing driver), the meter is left out, because that GPU may be in use.
    """
    found = {}
    for name, meter in _METERS.items():
        values = samples.get(name, ())
        if values and all(math.isfinite(value) for value, _ in values):
            value, at_s = max(values, key=lambda sample: sample[0])
            found[meter] = Signal(value / 100.0, at_s)
    return found


def reading_of(samples: PageSamples, now_s: float) -> NodeReading:
    """Returns the values of a metrics page other than the meters, such as power and energy. `meters_of` returns the
    meters.
    """

    def total(name: str) -> float | None:
        values = [value for value, _ in samples.get(name, ())]
        return sum(values) if values and all(map(math.isfinite, values)) else None

    cpu_percent, cores = total("ray_node_cpu_utilization"), total("ray_node_cpu_count")
    used, free = total("ray_node_disk_usage"), total("ray_node_disk_free")
    millijoules, gpus = total(TOTAL_ENERGY.name), samples.get(GPU_UTIL.name, ())
    if gpus and len(samples.get(TOTAL_ENERGY.name, ())) < len(gpus):
        millijoules = None  # a GPU missing from one sample would return with its lifetime energy
    milliwatts = total("ray_node_gpu_power_milliwatts")
    return NodeReading(
        at_s=now_s,
        memory_use=_share(total("ray_node_mem_used"), total("ray_node_mem_total")),
        disk_use=None if used is None or free is None else _share(used, used + free),
        network_in_bps=total("ray_node_network_receive_speed"),
        network_out_bps=total("ray_node_network_send_speed"),
        disk_read_bps=total("ray_node_disk_io_read_speed"),
        disk_write_bps=total("ray_node_disk_io_write_speed"),
        cores_used=None if cpu_percent is None or cores is None else cpu_percent / 100.0 * cores,
        gpu_power_w=total(POWER_USAGE.name) if milliwatts is None else milliwatts / 1000.0,
        gpu_energy_j=None if millijoules is None else millijoules / 1000.0,
        cpu_energy_j=total(RAPL_ENERGY),
        oom_kills=total(OOM_KILLS),
        clock_skew_s=total(CLOCK_SKEW),
    )


def clock_skew_s(date: str, sent_s: float, received_s: float) -> float | None:
    """Returns by how many seconds a machine's clock is ahead of this machine's clock. The result is negative if the
    machine's clock is behind.

    `date` is the `Date` header of the machine's response, in whole seconds. The result is the smallest skew that
    explains this date. Returns None if the date is not valid.
    """
    try:
        began_s = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    if began_s > received_s:
        return began_s - received_s
    return min(0.0, began_s + 1.0 - sent_s)


def with_exporter(exporter: NodeReading, reading: NodeReading) -> NodeReading:
    """Returns the reading of Ray's agent, with some values replaced by those of the exporter on the same machine: the
    time, GPU power, GPU and CPU energy, and OOM kills. If the exporter has no GPU power, the agent's value stays.
    """
    return replace(
        reading,
        at_s=exporter.at_s,
        gpu_power_w=reading.gpu_power_w if exporter.gpu_power_w is None else exporter.gpu_power_w,
        gpu_energy_j=exporter.gpu_energy_j,
        cpu_energy_j=exporter.cpu_energy_j,
        oom_kills=exporter.oom_kills,
    )


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
