"""Ray's head node in an embedded cluster: GCS, dashboard with job submission, and a raylet without resources."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence

import httpx

from raytide.control.bootstrap.cluster_record import CLIENT_PORT_BASE, LocalCluster
from raytide.control.bootstrap.loopback import is_listening
from raytide.control.supervision.daemon import spawn
from raytide.core.errors import ClusterError
from raytide.core.io.process import Process

_OBJECT_STORE_BYTES = 128 << 20
_POLL_S = 0.1
_LOG_TAIL = 5


def start_head(cluster: LocalCluster, *, environment: Mapping[str, str], pass_fds: Sequence[int] = ()) -> Process:
    """Starts the head without Ray's own autoscaler (`--no-monitor`), because raytide's controller replaces it."""
    gcs_port = cluster.gcs_address.rpartition(":")[2]
    dashboard_port = cluster.dashboard_url.rpartition(":")[2]
    options = {
        "node-ip-address": cluster.head_ip,
        "port": gcs_port,
        "dashboard-host": cluster.head_ip,
        "dashboard-port": dashboard_port,
        "dashboard-agent-listen-port": cluster.agent_address.rpartition(":")[2],
        "ray-client-server-port": str(CLIENT_PORT_BASE + cluster.k),
        "temp-dir": str(cluster.ray_temp_dir),
        "num-cpus": "0",
        "num-gpus": "0",
        "object-store-memory": str(_OBJECT_STORE_BYTES),
        "include-log-monitor": "false",
    }
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"]
    argv += [f"--{key}={value}" for key, value in options.items()]
    return spawn("head", argv, run_dir=cluster.run_dir, environment=environment, pass_fds=pass_fds)


def wait_for_head(cluster: LocalCluster, head: Process, *, timeout_s: float) -> None:
    """Waits until the head accepts nodes (its raylet is registered) and jobs (its agent listens). Raises ClusterError
    if the head ends, or if it is not ready after `timeout_s` seconds.
    """
    log = cluster.log("head")
    deadline = time.monotonic() + timeout_s
    missing = ""
    url, headers = cluster.dashboard_url, cluster.ray_headers
    with httpx.Client(base_url=url, headers=headers, timeout=5.0, trust_env=False) as dashboard:
        while time.monotonic() < deadline:
            if not head.alive:
                lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
                tail = " | ".join(line.strip() for line in lines if line.strip())
                raise ClusterError(
                    f"the Ray head of cluster {cluster.name} failed to start: {tail}", hint=f"See {log}."
                )
            missing = _missing(cluster, dashboard)
            if not missing:
                return
            time.sleep(_POLL_S)
    raise ClusterError(
        f"the Ray head of cluster {cluster.name} was not ready within {timeout_s:g} s: {missing}.",
        hint=f"See {log}.",
    )


def _missing(cluster: LocalCluster, dashboard: httpx.Client) -> str:
    """Returns why the head is not ready yet; empty if it is ready. Uses HTTP, because this process may lack the
    cluster's Ray token."""
    if not is_listening(cluster.gcs_address):
        return "nothing listens"
    try:
        response = dashboard.get("/api/v0/nodes")
    except httpx.HTTPError as error:
        return f"its dashboard does not respond: {error}"
    if not response.is_success:
        return f"its dashboard responded with {response.status_code}: {response.text.strip()[-200:]}"
    if not response.json()["data"]["result"]["result"]:
        return "its raylet is not registered"
    return "" if is_listening(cluster.agent_address) else "it does not take jobs yet"
