"""Starts Ray's head with its tables in Redis. The nodes of an earlier head reconnect to the new head at the same
address."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx

from raytide.control.bootstrap.cluster_record import RAY_ENVIRONMENT, HeadCluster
from raytide.control.bootstrap.head.redis_users import RedisUser
from raytide.control.supervision.daemon import spawn
from raytide.core.errors import ClusterError
from raytide.core.io.environment import ON_NODES, all_passed, passed
from raytide.core.io.process import Process
from raytide.core.objects.cluster_config import RaytideSection
from raytide.core.ray_internals import dashboard_url, gcs_client

RAY = "ray"
HEAD_MARK = "RAYTIDE_HEAD"
"""The environment variable that marks every process of one machine's head; its value is the run folder."""
_OBJECT_STORE_BYTES = 128 << 20
_POLL_S = 0.2
_STARTED = b"Ray runtime started"
"""The text that `ray start` prints once its raylet is registered. Until then, the tables have the former head's
raylet."""
_TEMPORARY = "rt-head-"


def start_ray(cluster: HeadCluster, settings: RaytideSection, user: RedisUser, life: int) -> Process:
    """Starts Ray's head without Ray's own autoscaler, in a new session folder. It uses the tables of the cluster's
    present life.
    """
    assert settings.standby is not None
    section = settings.standby
    temp_dir = Path(tempfile.mkdtemp(prefix=_TEMPORARY))  # short: it holds unix sockets
    (cluster.run_dir / "ray_temp_dir").write_text(str(temp_dir))
    options = {
        "node-ip-address": section.address,
        "port": str(section.gcs_port),
        "temp-dir": str(temp_dir / "r"),
        "num-cpus": "0",
        "num-gpus": "0",
        "object-store-memory": str(_OBJECT_STORE_BYTES),
        "include-log-monitor": "false",
        "redis-username": user.name,
        "redis-password": user.password,
    }
    argv = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--no-monitor"]
    argv += [*(f"--{key}={value}" for key, value in options.items()), *section.ray_options]
    host, port = section.redis_address
    rays = {
        **RAY_ENVIRONMENT,
        "RAY_AUTH_TOKEN_PATH": str(cluster.ray_token_file),
        "RAY_REDIS_ADDRESS": f"{'rediss://' if section.has_tls else ''}{host}:{port}",
        "RAY_external_storage_namespace": f"{cluster.name}-{life:x}" if life else cluster.name,
        # A driver that was being started when the former head was lost never comes; Ray's default is 900 s.
        "RAY_JOB_START_TIMEOUT_SECONDS": "60",
    }
    named = (HEAD_MARK, *all_passed(settings.pass_environment))
    cluster.log(RAY).unlink(missing_ok=True)
    environment = {**passed(cluster.with_cluster_mark(dict(os.environ)), ON_NODES, named), **rays}
    return spawn(RAY, argv, run_dir=cluster.run_dir, environment=environment)


def wait_for_ray(cluster: HeadCluster, ray: Process, *, timeout_s: float, check: Callable[[], None]) -> str:
    """Waits until Ray's head has started, and returns the URL of Ray's dashboard. While it waits, it calls `check`
    repeatedly. An exception of `check` ends the wait."""
    deadline, missing = time.monotonic() + timeout_s, "its GCS does not listen"
    while time.monotonic() < deadline:
        check()
        if not ray.alive:
            raise ClusterError("Ray's head ended while it started.", hint=f"See {cluster.log(RAY)}.")
        try:
            if url := dashboard_url(gcs_client(cluster.gcs_address)):
                httpx.get(f"{url}/api/version", timeout=2.0, headers=cluster.ray_headers, trust_env=False)
                if _STARTED in cluster.log(RAY).read_bytes():
                    return url
                missing = "its raylet is not registered"
            else:
                missing = "its dashboard did not start"
        except (OSError, httpx.HTTPError) as error:
            missing = f"it does not answer: {error}"
        time.sleep(_POLL_S)
    raise ClusterError(
        f"Ray's head at {cluster.gcs_address} was not ready within {timeout_s:g} s: {missing}.",
        hint=f"See {cluster.log(RAY)}.",
    )


def forget_ray(run_dir: Path) -> None:
    """Moves the logs of Ray's last session on this machine to the run folder, and removes the session's folder. Call it
    only after Ray has ended."""
    with suppress(OSError):
        temp_dir = Path((run_dir / "ray_temp_dir").read_text())
        if temp_dir.name.startswith(_TEMPORARY):
            with suppress(OSError, shutil.Error):
                for logs in temp_dir.glob("r/session_2*/logs"):
                    shutil.copytree(logs, run_dir / "logs" / "ray", dirs_exist_ok=True)
            shutil.rmtree(temp_dir, ignore_errors=True)
        (run_dir / "ray_temp_dir").unlink()
