"""Metrics of nodes, spot markets and launches."""

from typing import Final

from raytide.core.telemetry.metrics import Metric

_INFRA: Final = "infrastructure"

NODES = Metric("raytide_nodes", "gauge", "Nodes by type, market and state", _INFRA, labels=("type", "market", "state"))
GPUS = Metric(
    "raytide_gpus",
    "gauge",
    "GPUs by use: training, serving, batch, unmanaged (used outside raytide), idle or starting",
    _INFRA,
    labels=("use", "market"),
)
NODE_USE = Metric(
    "raytide_node_use_ratio",
    "gauge",
    "Last measured physical utilization: cpu, gpu, memory or disk",
    _INFRA,
    "ratio",
    ("node", "meter"),
)
NODE_NETWORK = Metric(
    "raytide_node_network_bytes_per_second",
    "gauge",
    "Network traffic of a node: in or out",
    _INFRA,
    "bytes",
    ("node", "direction"),
)
NODE_DISK = Metric(
    "raytide_node_disk_bytes_per_second",
    "gauge",
    "Disk traffic of a node: read or write",
    _INFRA,
    "bytes",
    ("node", "direction"),
)
NODE_POWER = Metric(
    "raytide_node_power_watts",
    "gauge",
    "Power of a node: of its GPUs (nvml), of its CPU packages (rapl), or an estimate from its CPU-seconds",
    _INFRA,
    "watts",
    ("node", "source"),
)
NODE_ENERGY = Metric(
    "raytide_node_energy_joules",
    "counter",
    "Energy that a node used, by how it is known",
    _INFRA,
    "joules",
    ("node", "source"),
)
POOL_FAILURES = Metric(
    "raytide_pool_failures", "gauge", "Consecutive failed launches of a pool", _INFRA, labels=("type", "zone")
)
NODES_LOST = Metric(
    "raytide_nodes_lost", "counter", "Nodes that ended without being asked to", _INFRA, labels=("type", "market")
)
SPOT_NOTICES = Metric(
    "raytide_spot_notices", "counter", "Announced interruptions of spot nodes", _INFRA, labels=("type",)
)
LAUNCH_FAILURES = Metric(
    "raytide_launch_failures", "counter", "Failed launches of nodes", _INFRA, labels=("type", "zone")
)
DISK_FREE = Metric("raytide_disk_free_bytes", "gauge", "Free space on the disk of the run folder", _INFRA, "bytes")
