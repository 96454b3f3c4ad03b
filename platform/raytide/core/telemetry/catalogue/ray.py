"""Metrics of Ray's agents that raytide's alerts need, under Ray's own names.

Ray's pages have hundreds of other metrics. raytide's monitor drops those, but a Prometheus beside the cluster keeps
them.
"""

from raytide.core.telemetry.metrics import Metric, counter

_NODE = "node"

SPILLED_BYTES = Metric(
    "ray_spill_manager_objects_bytes",
    "gauge",
    "Bytes of objects of a node, by state; those that are on disk for lack of memory have the state Spilled",
    (_NODE, "State"),
    unit="bytes",
)
WORKER_EVICTIONS = counter(
    "ray_memory_manager_worker_eviction",
    "Workers and tasks that Ray ended because their node ran out of memory",
    _NODE,
    "Type",
    "Name",
)
