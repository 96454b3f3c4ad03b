"""A Ray of a test's own, which also starts on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raytide.core.io.process import free_port

AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def agent_ports() -> dict[str, int]:
    """Returns a port for each agent of a node. A raylet that is given none waits for its agents to choose theirs, and
    ends if that takes more than 15 seconds."""
    return {name: free_port() for name in AGENTS}


@contextmanager
def own_ray(address: str, cpus: int, **options: Any) -> Iterator[Any]:
    """Runs one node at a loopback address of its own, with this process as its driver in raytide's namespace. The
    options are those of `ray.init`."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"node_ip_address": address, "num_cpus": cpus, "object_store_memory": 100 << 20, **agent_ports()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node})
        try:
            ray.init(address=cluster.address, namespace="raytide", log_to_driver=False, **options)
            yield ray
        finally:
            ray.shutdown()
            cluster.shutdown()
