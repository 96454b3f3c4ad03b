"""Metrics of nodes, spot markets and launches."""

from raytide.core.telemetry.metrics import counter, gauge

NODES = gauge("raytide_nodes", "Nodes by type, market and state", "type", "market", "state")
GPUS = gauge(
    "raytide_gpus",
    "GPUs by use: training, serving, batch, unmanaged (used outside raytide), idle or starting",
    "use",
    "market",
)
NODE_USE = gauge(
    "raytide_node_use_ratio", "Last measured physical utilization: cpu, gpu, memory or disk", "node", "meter"
)
NODE_NETWORK = gauge(
    "raytide_node_network_bytes_per_second", "Network traffic of a node: in or out", "node", "direction"
)
NODE_DISK = gauge("raytide_node_disk_bytes_per_second", "Disk traffic of a node: read or write", "node", "direction")
NODE_POWER = gauge(
    "raytide_node_power_watts",
    "Power of a node: of its GPUs (nvml), of its CPU packages (rapl), or an estimate from its CPU-seconds",
    "node",
    "source",
)
NODE_ENERGY = counter("raytide_node_energy_joules", "Energy that a node used, by how it is known", "node", "source")
NODE_CLOCK_SKEW = gauge(
    "raytide_node_clock_skew_seconds",
    "How far the clock of a node is ahead of the controller's, at least; 0 within a second",
    "node",
)
NODE_OOM_KILLS = counter(
    "raytide_node_oom_kills", "Processes that the kernel of a machine ended for lack of memory since its start", "node"
)
POOL_FAILURES = gauge("raytide_pool_failures", "Consecutive failed launches of a pool", "type", "zone")
NODES_LOST = counter("raytide_nodes_lost", "Nodes that ended without being asked to", "type", "market")
SPOT_NOTICES = counter("raytide_spot_notices", "Announced interruptions of spot nodes", "type")
LAUNCH_FAILURES = counter("raytide_launch_failures", "Failed launches of nodes", "type", "zone")
DISK_FREE = gauge("raytide_disk_free_bytes", "Free space on the disk of the run folder")
