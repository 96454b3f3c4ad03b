"""Runs raytide's supervisor, controller and API beside the Ray head of a cloud cluster or of a RayCluster.

`raytide head FILE` is the last command in `head_start_ray_commands`. FILE is cluster.yaml with the values that `ray
up` has added.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

from raytide.control.accounting.final_accounting import Closed, close_books, sole_lead
from raytide.control.bootstrap.cluster_record import HeadCluster, load, run_dir_of
from raytide.control.bootstrap.control_plane import (
    end_children,
    end_nodes,
    grant_access,
    start_supervisor,
    wait_for_api,
)
from raytide.control.bootstrap.exposure import check_running
from raytide.control.bootstrap.head.ending import leading_to_the_end
from raytide.control.bootstrap.wiring import end_head, provider
from raytide.control.supervision.daemon import hold_lock
from raytide.core.clock import SystemClock
from raytide.core.config import raytide_version
from raytide.core.errors import ClusterError, ConfigError, UsageError
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.ray_internals import dashboard_url, gcs_address_here, gcs_client
from raytide.core.state import Store
from raytide.dashboards.rules.overrides import adjusted_groups

API_PORT, SERVE_PORT = 7400, 8000
_POLL_S = 0.5


def start(
    config_path: Path, *, insecure: bool = False, monitoring: bool = False, timeout_s: float = 120.0
) -> HeadCluster:
    """Starts the cluster of this file. A cluster that was started before continues with its earlier records, ledger and
    tokens.

    Raises ClusterError if Ray is open to other machines. `insecure` skips this check.
    """
    config = load_cluster(config_path)
    adjusted_groups(config.settings.monitoring.alerts)
    if config.settings.standby is not None:
        raise UsageError(
            f"{config_path} has metadata.raytide.standby: its head is one of several.",
            hint=f"Run `raytide head {config_path} --standby` on each of them, without `ray start`.",
        )
    gcs_address = gcs_address_here()
    if not gcs_address:
        raise ClusterError(
            "Ray is not running on this machine.",
            hint="Start it first (`ray start --head --no-monitor`), or set RAY_ADDRESS.",
        )
    run_dir = run_dir_of(config.name)
    make_run_dir(run_dir)
    _file_token(run_dir)
    with hold_lock(run_dir / "head.lock"):
        before = load(run_dir)
        if before is not None and not isinstance(before, HeadCluster):
            raise ConfigError(f"{run_dir} belongs to an embedded cluster.", hint="Use another cluster_name.")
        if before is not None:
            end_children(before)
        if config_path.resolve() != run_dir / "cluster.yaml":  # a restored cluster starts with its own
            shutil.copyfile(config_path, run_dir / "cluster.yaml")
        cluster = HeadCluster(
            name=config.name,
            cluster_id=before.cluster_id if before else f"{config.name}-{secrets.token_hex(6)}",
            run_dir=run_dir,
            gcs_address=gcs_address,
            dashboard_url=_dashboard(gcs_address, timeout_s),
            api_url=f"http://{_host(gcs_address)}:{API_PORT}",
            serve_url=f"http://{_host(gcs_address)}:{SERVE_PORT}",
            state_url=config.settings.state_url or f"sqlite:///{run_dir / 'state.db'}",
            config_path=run_dir / "cluster.yaml",
            created_at_s=before.created_at_s if before else time.time(),
            version=raytide_version(),
            monitoring=monitoring,
        )
        start_control_plane(cluster, insecure=insecure, timeout_s=timeout_s)
    return cluster


def make_run_dir(run_dir: Path) -> None:
    for folder in (run_dir, run_dir / "pids", run_dir / "logs"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    run_dir.chmod(0o700)  # it may be from an earlier version, or made by hand


def start_control_plane(cluster: HeadCluster, *, insecure: bool, timeout_s: float) -> None:
    """Starts the supervisor beside a running Ray, and returns when the API answers."""
    if not insecure:
        check_running(cluster.gcs_address, cluster.dashboard_url)
    provider(cluster).close()  # fail here rather than in the controller
    cluster.save()
    granted = [cluster.client_file, cluster.gateway_file]
    granted += [cluster.alertmanager_token_file] if cluster.monitoring else []
    if not all(file.exists() for file in granted):
        grant_access(cluster)
    start_supervisor(cluster)
    wait_for_api(cluster, timeout_s=timeout_s)


def run_foreground(cluster: HeadCluster) -> None:
    """Waits until the supervisor ends or a SIGTERM comes. Then it ends the supervisor and the supervisor's children.
    Containers and systemd run this function.

    Raises ClusterError if neither `down` nor a SIGTERM ended the supervisor, so that systemd starts the command again.
    """
    supervisor = cluster.process("supervisor")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        if supervisor is not None:
            supervisor.wait(None)
    finally:
        end_children(cluster)
    with (cluster.run_dir / "head.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # wait for `down`: in a container, it would end with this process
    if cluster.client_file.exists():  # `down` removes it first
        raise ClusterError(f"the supervisor of cluster {cluster.name} ended.", hint=f"See {cluster.log('supervisor')}.")


def down(cluster: HeadCluster, *, timeout_s: float = 120.0) -> Closed:
    """Ends raytide's processes on this machine and every node that raytide bought, and returns the final accounts.
    Ray's head keeps running, unless this machine is one of several heads, or a pod of KubeRay's."""
    with hold_lock(cluster.run_dir / "head.lock"), leading_to_the_end(cluster):
        cluster.client_file.unlink(missing_ok=True)
        cluster.gateway_file.unlink(missing_ok=True)
        cluster.alertmanager_token_file.unlink(missing_ok=True)
        end_children(cluster)
        machines = end_nodes(provider(cluster, only_ends=True), time.monotonic() + timeout_s)
        opened = closing(Store.open(cluster.state_url, head_epoch=cluster.head_epoch))
        with opened as store, sole_lead(store, cluster.holder):
            closed = close_books(store, machines, SystemClock().now_s())
        end_head(cluster)
        return closed


def _file_token(run_dir: Path) -> None:
    """Moves Ray's token from the environment to a file, because all child processes would inherit the variable."""
    if token := os.environ.pop("RAY_AUTH_TOKEN", ""):
        file = run_dir / "ray_token"
        file.touch(mode=0o600)
        file.write_text(token)
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)


def _dashboard(gcs_address: str, timeout_s: float) -> str:
    """Waits for Ray's dashboard, which starts some seconds after its GCS, and returns its URL."""
    deadline, missing = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            if url := dashboard_url(gcs_client(gcs_address)):
                return url
            missing = "its dashboard did not start"
        except OSError as error:
            missing = f"it does not respond: {error}"
        time.sleep(_POLL_S)
    raise ClusterError(f"Ray at {gcs_address}: {missing}.", hint="`ray status` shows whether its head runs.")


def _host(address: str) -> str:
    return address.rpartition(":")[0]
