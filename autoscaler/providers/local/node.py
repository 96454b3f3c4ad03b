"""The process of one local node: `python -m raytide.autoscaler.providers.local.node FOLDER LOCK_FD`.

It starts a raylet, waits for the raylet's end or a SIGTERM, and then kills all processes of the node.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from raytide.autoscaler.providers.local.files import MARK, LocalMachine, NodeFolder
from raytide.autoscaler.providers.local.meter import start_meter
from raytide.core import ray_internals
from raytide.core.errors import ClusterError
from raytide.core.io.process import Process, kill_marked

_OBJECT_STORE_BYTES = 128 << 20
RAYLET_ENDED = "its raylet ended"
_LEAVE_S = 2.0
"""The time that a raylet has to report its end to the GCS."""
_FIRST_PORT, _PORTS_PER_NODE, _NODES = 10_100, 4, 5_000
"""The ports are below Linux's ephemeral range, so that no outgoing connection uses one of them."""


def main(path: str, lock: str) -> int:
    def meter_of_gpus(folder: NodeFolder, purchase: LocalMachine) -> str:
        return start_meter(folder, purchase) if purchase.resources.get("GPU") else ""

    return run_node(path, lock, start_meter=meter_of_gpus)


def run_node(
    path: str,
    lock: str,
    *,
    object_store_bytes: int | None = _OBJECT_STORE_BYTES,
    start_meter: Callable[[NodeFolder, LocalMachine], str] | None = None,
    how_it_ended: Callable[[Process], str] = lambda raylet: RAYLET_ENDED,
) -> int:
    """Runs the node of this folder until its raylet ends or a SIGTERM comes.

    The size of the object store is the resource `object_store_memory` of the node. If the node has no such resource,
    the size is `object_store_bytes`. If `object_store_bytes` is None, Ray chooses the size.

    `start_meter` may start a metrics exporter. It returns the exporter's `host:port`, or an empty string.
    """
    os.set_inheritable(int(lock), False)  # held by this process alone: free means that the node is gone
    folder = NodeFolder(Path(path))
    purchase = folder.machine()
    if purchase is None or folder.end() is not None:
        return 0
    this = Process.of(os.getpid(), f"node {folder.node_id}")
    assert this is not None
    folder.record_process(this)
    try:
        raylet = start_raylet(purchase, object_store_bytes)
        signal.signal(signal.SIGTERM, _stop)
        if start_meter is not None and (meter := start_meter(folder, purchase)):
            folder.record_meter(meter)
        raylet.wait(None)
        folder.announce_end(how_it_ended(raylet))
    except SystemExit:
        raylet.send(signal.SIGTERM)
        raylet.wait(_LEAVE_S)
    except Exception:
        folder.announce_end("its raylet did not start")
        raise
    finally:
        kill_marked(MARK, folder.mark)
        session = Path(purchase.temp_dir, "session_latest")
        shutil.rmtree(session / _runtime_env_folder(purchase), ignore_errors=True)
    return 0


def start_raylet(purchase: LocalMachine, object_store_bytes: int | None = _OBJECT_STORE_BYTES) -> Process:
    """Starts the raylet and returns at once. The raylet joins the cluster a few seconds later."""
    raylet = Process.of(ray_internals.start_raylet(_parameters(purchase, object_store_bytes)), "raylet")
    if raylet is None:
        raise ClusterError(f"the raylet of {purchase.node_id} ended while it started.")
    return raylet


def _parameters(purchase: LocalMachine, object_store_bytes: int | None) -> dict[str, Any]:
    resources = dict(purchase.resources)
    metrics, export, listen, runtime_env = _ports(purchase)
    sockets = f"{purchase.temp_dir}/{purchase.slot}.{os.getpid()}"  # short: a socket's path has at most 107 characters
    return {
        "gcs_address": purchase.gcs_address,
        "redis_address": purchase.gcs_address,
        "node_ip_address": purchase.address,
        "temp_dir": purchase.temp_dir,
        "node_name": purchase.node_id,
        "num_cpus": _whole(resources.pop("CPU", 0)),
        "num_gpus": _whole(resources.pop("GPU", 0)),
        "memory": _whole(resources.pop("memory", None)),
        "object_store_memory": _whole(resources.pop("object_store_memory", object_store_bytes)),
        "resources": resources,
        "labels": dict(purchase.labels),
        "raylet_socket_name": f"{sockets}.r",
        "plasma_store_socket_name": f"{sockets}.p",
        "node_manager_port": 0,
        "min_worker_port": 0,
        "max_worker_port": 0,
        "metrics_agent_port": metrics,
        "metrics_export_port": export,
        "dashboard_agent_listen_port": listen,
        "runtime_env_agent_port": runtime_env,
        "include_log_monitor": False,
        "runtime_env_dir_name": _runtime_env_folder(purchase),
        "env_vars": {"RAY_CLOUD_INSTANCE_ID": purchase.node_id, "RAY_NODE_TYPE_NAME": purchase.node_type},
    }


def _runtime_env_folder(purchase: LocalMachine) -> str:
    """Returns the name of this node's own folder for unpacked working directories, in the session's folder.

    All raylets of a machine share the session's folder. Each empties the folder of a working directory before it
    unpacks there, although a worker of another node may be running in it.
    """
    return f"runtime_resources_{purchase.node_id}"


def _ports(purchase: LocalMachine) -> tuple[int, ...]:
    """Returns ports for the agents: a raylet that knows them in advance does not wait for its agents and starts in 3.4
    s instead of 5.0 s.

    Some agents listen on every address, so the ports are computed from K and the slot, a pair that no other node of the
    machine has. If one of the ports is taken, all are zero, and Ray chooses.
    """
    k = int(purchase.address.split(".")[2])
    first = _FIRST_PORT + (k * 256 + purchase.slot) % _NODES * _PORTS_PER_NODE
    ports = tuple(range(first, first + _PORTS_PER_NODE))
    return ports if all(_is_free(port) for port in ports) else (0,) * _PORTS_PER_NODE


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _whole(amount: float | None) -> int | None:
    return None if amount is None else int(amount)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
