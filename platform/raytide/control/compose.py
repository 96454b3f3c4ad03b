"""The real ways in and out of a cluster, for its controller."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from raytide.actors.gang.groups import PlacementGroups
from raytide.actors.serving.control import ServeControl
from raytide.autoscaler.gcs import GcsReader
from raytide.autoscaler.meters import Meters
from raytide.control.cluster import provider
from raytide.control.door import Door
from raytide.control.drivers import Drivers
from raytide.control.embedded import LocalCluster
from raytide.control.world import Sources
from raytide.core.clock import SystemClock

RAY_NAMESPACE = "raytide"


def sources(cluster: LocalCluster) -> Sources:
    """Connects this process to Ray."""
    import ray

    ray.init(address=cluster.gcs_address, namespace=RAY_NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    serve = urlsplit(cluster.serve_url)
    return Sources(
        provider=provider(cluster),
        gcs=GcsReader(cluster.gcs_address),
        groups=PlacementGroups(),
        drivers=Drivers(cluster.dashboard_url, cluster.run_dir, cluster.ray_headers),
        serve=ServeControl(serve.hostname or cluster.head_ip, serve.port or 8000),
        door=Door(cluster.api_url, SystemClock()),
        meters=Meters(GcsReader(cluster.gcs_address), SystemClock()),
    )
