"""An embedded cluster: what every cluster has, on addresses of its own of this machine, with a token for its Ray."""

from __future__ import annotations

import os
from pathlib import Path

from raytide.control.bootstrap.cluster_record import RunningCluster
from raytide.control.supervision.log_rotation import KEPT_FILES, MOST_BYTES
from raytide.core.io.environment import ON_NODES, all_passed, passed
from raytide.core.objects.cluster_config import load_cluster

__all__ = ["AGENT_PORT_BASE", "GCS_PORT_BASE", "RAY_ENVIRONMENT", "LocalCluster"]

GCS_PORT_BASE, AGENT_PORT_BASE = 6379, 8266
"""Each cluster's is this + K: the GCS listens on every address of the machine, and the agent of the head, which starts
the drivers of jobs, on 127.0.0.1 too. An agent that cannot have both takes no jobs, for good.
"""

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # some of Ray's ports are open on every address: nobody gets in without ray_token_file
    "RAY_enable_autoscaler_v2": "1",  # without it the GCS does not report demand
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ROTATION_MAX_BYTES": str(MOST_BYTES),  # each log of Ray's own, as those of raytide
    "RAY_ROTATION_BACKUP_COUNT": str(KEPT_FILES),
    # A killed raylet refuses connections: dead after 5 refusals, 1 s apart. One that is only slow has 5 times 10 s.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}

_FOREIGN = ("RAY_", "RAYTIDE_NODE", "RAYTIDE_API", "RAYTIDE_TOKEN")
"""Not inherited: `up` may itself run inside a Ray job, or inside another cluster's."""


class LocalCluster(RunningCluster):
    """It owns 127.0.K.* on this machine: K.1 is the head, each node has its own K.N."""

    k: int
    temp_dir: Path
    """Open to raytide's user alone. Short, because a unix socket's path has at most 107 characters."""

    @property
    def ray_temp_dir(self) -> Path:
        """Ray's session, sockets and logs. Ray lets everybody write into this folder and those below it."""
        return self.temp_dir / "r"

    @property
    def agent_address(self) -> str:
        """The head's dashboard agent, which starts the drivers of jobs."""
        return f"{self.head_ip}:{AGENT_PORT_BASE + self.k}"

    @property
    def ray_token_file(self) -> Path:
        return self.run_dir / "ray_token"

    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        return self.with_cluster_mark({**inherited, **RAY_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file)})

    def node_environment(self) -> dict[str, str]:
        """What Ray's head and the nodes inherit, and with them drivers, trainers, replicas and scripts."""
        named = all_passed(load_cluster(self.config_path).settings.pass_environment)
        rays = {"RAY_AUTH_TOKEN_PATH": str(self.ray_token_file), **RAY_ENVIRONMENT}
        return {**passed(self.environment(), ON_NODES, named), **rays}
