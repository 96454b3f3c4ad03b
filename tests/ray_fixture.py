"""A Ray of a test's own, which also starts on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raytide.core.io.process import free_port

AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
JOINS_S = 240.0


@contextmanager
def patient_starts() -> Iterator[None]:
    """Nodes that this process starts within the block have as much time as they need. Ray's own raylet ends if its
    agents take more than 15 seconds to choose their ports, and Ray gives a node up that has not joined within 30."""
    from ray import _raylet
    from ray._private import services
    from ray._private.node import Node

    raylet: Any = _raylet
    start, find = Node.start_raylet, services.get_node

    def start_raylet(node: Any, *args: Any, **options: Any) -> Any:
        for name in AGENTS:
            setattr(node._ray_params, name, free_port())
        # Ray passes this one on to the agent alone, and the raylet waits for the agent's word.
        port, folder = node._ray_params.dashboard_agent_listen_port, node.get_session_dir_path()
        raylet.persist_port(folder, node.node_id, raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        return start(node, *args, **options)

    def get_node(*args: Any) -> Any:
        deadline = time.monotonic() + JOINS_S
        while True:
            try:
                return find(*args)
            except RuntimeError:  # it has not joined yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "start_raylet", start_raylet)
        patch.setattr(services, "get_node", get_node)
        yield


@contextmanager
def own_ray(address: str, cpus: int, **options: Any) -> Iterator[Any]:
    """Runs one node at a loopback address of its own, with this process as its driver in raytide's namespace. The
    options are those of `ray.init`."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        try:
            with patient_starts():
                ray.init(
                    address="local",  # beside whatever cluster this machine or session runs
                    num_cpus=cpus,
                    namespace="raytide",
                    include_dashboard=False,
                    log_to_driver=False,
                    object_store_memory=100 << 20,
                    _node_ip_address=address,
                    **options,
                )
            yield ray
        finally:
            ray.shutdown()
