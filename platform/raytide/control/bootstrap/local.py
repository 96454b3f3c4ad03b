"""Starts and ends embedded clusters. `down` leaves no process behind, even if some processes were killed before."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from raytide.actors.gang.member_processes import account_of
from raytide.autoscaler.providers.hosts.provider import HOSTS_FOLDER
from raytide.autoscaler.providers.local.files import node_folders
from raytide.autoscaler.providers.slurm.provider import SLURM_FOLDER
from raytide.control.accounting.final_accounting import Closed, close_books, sole_lead
from raytide.control.bootstrap.cluster_record import (
    AGENT_PORT_BASE,
    CLIENT_PORT_BASE,
    GCS_PORT_BASE,
    MARK,
    LocalCluster,
    load,
    run_dir_of,
)
from raytide.control.bootstrap.control_plane import (
    end_children,
    end_nodes,
    grant_access,
    start_supervisor,
    wait_for_api,
)
from raytide.control.bootstrap.loopback import ANY, FIRST_K, LAST_K, claim
from raytide.control.bootstrap.ray_head import start_head, wait_for_head
from raytide.control.bootstrap.wiring import bill, provider
from raytide.control.supervision.daemon import hold_lock
from raytide.control.supervision.supervisor import CHILDREN, ensure_owner_watched
from raytide.core.clock import SystemClock
from raytide.core.config import environment, raytide_version
from raytide.core.errors import ConflictError, NotFoundError, UsageError
from raytide.core.io.process import Process, kill_marked
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.state import Store
from raytide.dashboards.rules.overrides import adjusted_groups

DEFAULT_CONFIG = Path(__file__).with_name("local.yaml")
_HOSTS_END_S = 60.0
_TEMPORARY_START_S = 400.0
"""The longest start of a temporary cluster in seconds. Such clusters often start beside others on a busy machine."""
DASHBOARD_PORT, API_PORT, SERVE_PORT = 8265, 7400, 8000


def up(
    config_path: str | Path | None = None,
    name: str = "local",
    *,
    k: int | None = None,
    children: Mapping[str, str] = CHILDREN,
    timeout_s: float = 120.0,
    owner: Process | None = None,
    monitoring: bool = False,
) -> LocalCluster:
    """Starts and returns a cluster. If a cluster of this name runs without its supervisor, restarts the supervisor and
    returns that cluster.

    If the start of a new cluster fails, the parts that have started are ended. A restored cluster can then be started
    again. A new cluster with an `owner` ends when the owner process ends. With `monitoring`, Prometheus and
    Alertmanager run beside the cluster. Both must be installed. They keep the measurements of an earlier cluster of
    this name.
    """
    _check_name(name)
    config = load_cluster(config_path or DEFAULT_CONFIG)
    for user in config.settings.users():
        account_of(user)  # fail here rather than in the first script
    adjusted_groups(config.settings.monitoring.alerts)  # fail here rather than in the monitor
    source = Path(config_path or DEFAULT_CONFIG).resolve()
    with _exclusive(name):
        cluster = _load(name)
        if cluster is not None and cluster.is_alive("head"):
            if cluster.is_alive("supervisor"):
                raise ConflictError(
                    f"cluster {name} is already up ({cluster.api_url}).",
                    hint=f"End it (`raytide down --name {name}`), or start another one (`--name other`).",
                )
            start_supervisor(cluster, children)
            wait_for_api(cluster, timeout_s=timeout_s)
            return cluster
        earlier, is_restored = None, cluster is None and source == run_dir_of(name) / "cluster.yaml"
        if cluster is not None:
            _end_everything(cluster)
            _close_books(cluster)
            earlier = _set_aside(cluster)
            if source.is_relative_to(cluster.run_dir):  # the file has moved with its folder
                source = earlier / source.relative_to(cluster.run_dir)
        with full_disk_is_an_error(str(run_dir_of(name))):
            cluster, claimed = _create(
                name,
                source,
                k,
                state_url=config.settings.state_url,
                owner=owner,
                monitoring=monitoring,
            )
            if monitoring and earlier is not None:
                _keep_measurements(earlier, cluster)
        deadline = time.monotonic() + timeout_s
        try:
            ensure_owner_watched(cluster.run_dir, cluster.environment())
            head = start_head(cluster, environment=cluster.node_environment(), pass_fds=[claimed.fileno()])
            wait_for_head(cluster, head, timeout_s=timeout_s)
            start_supervisor(cluster, children, pass_fds=[claimed.fileno()])
            wait_for_api(cluster, timeout_s=deadline - time.monotonic())
        except BaseException:
            with _uninterrupted():
                _end_everything(cluster)
                if is_restored:  # else the next `up` would close its books and set it aside
                    (cluster.run_dir / "cluster.json").unlink(missing_ok=True)
            raise
        finally:
            claimed.close()
        return cluster


def down(name: str = "local") -> Closed | None:
    """Ends a cluster in any state, even if it crashed or is half started, and books its last costs. The run folder
    stays.

    Returns the final records, or None if there is no such cluster.
    """
    _check_name(name)
    if not run_dir_of(name).parent.exists():
        return None
    with _exclusive(name), _uninterrupted():
        cluster = _load(name)
        if cluster is None:
            return None
        _end_everything(cluster)
        return _close_books(cluster)


def find(name: str | None = None) -> LocalCluster:
    """Returns the running cluster of that name. The default name is RAYTIDE_CLUSTER_NAME, or `local` if this variable
    is unset. Raises NotFoundError if the cluster is not running."""
    name = name or environment("CLUSTER_NAME") or "local"
    cluster = _load(name)
    if cluster is None or not cluster.is_alive("head"):
        raise NotFoundError(f"cluster {name} is not running.", hint="Start it: `raytide up --local`.")
    return cluster


@contextmanager
def temporary(
    home_dir: Path,
    config_path: str | Path | None = None,
    name: str = "local",
    *,
    children: Mapping[str, str] = CHILDREN,
    monitoring: bool = False,
) -> Iterator[LocalCluster]:
    """Yields a new cluster, and ends it after the block. The cluster's home folder is `home_dir`. Inside the block, the
    environment variable RAYTIDE_HOME of this process is set to `home_dir`.
    """
    before = os.environ.get("RAYTIDE_HOME")
    os.environ["RAYTIDE_HOME"] = str(home_dir)
    try:
        owner = Process.of(os.getpid())
        yield up(config_path, name, children=children, timeout_s=_TEMPORARY_START_S, owner=owner, monitoring=monitoring)
    finally:
        down(name)
        if before is None:
            del os.environ["RAYTIDE_HOME"]
        else:
            os.environ["RAYTIDE_HOME"] = before


def _load(name: str) -> LocalCluster | None:
    cluster = load(run_dir_of(name))
    if cluster is None or isinstance(cluster, LocalCluster):
        return cluster
    raise ConflictError(
        f"this machine is the head of cluster {name}.", hint="Use another --name for the embedded cluster."
    )


def _create(
    name: str, config_path: Path, k: int | None, *, state_url: str, owner: Process | None, monitoring: bool
) -> tuple[LocalCluster, socket.socket]:
    """Creates the run folder and claims the addresses. Nothing runs yet, but `down` would clean it up."""
    choices = range(FIRST_K, LAST_K + 1) if k is None else [k]
    k, claimed = claim({choice: _places(choice) for choice in choices})
    run_dir = run_dir_of(name)
    for folder in (run_dir, *(run_dir / name for name in ("pids", "nodes", "logs"))):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a killed `up` may have left some of them
    if config_path.resolve() != run_dir / "cluster.yaml":  # a restored cluster starts with its own
        shutil.copyfile(config_path, run_dir / "cluster.yaml")
    ip = f"127.0.{k}.1"
    cluster = LocalCluster(
        name=name,
        k=k,
        cluster_id=f"{name}-{secrets.token_hex(6)}",
        run_dir=run_dir,
        temp_dir=Path(tempfile.gettempdir()) / f"rt-{k}-{secrets.token_hex(4)}",
        gcs_address=f"{ip}:{GCS_PORT_BASE + k}",
        dashboard_url=f"http://{ip}:{DASHBOARD_PORT}",
        api_url=f"http://{ip}:{API_PORT}",
        serve_url=f"http://{ip}:{SERVE_PORT}",
        state_url=state_url or f"sqlite:///{run_dir / 'state.db'}",
        config_path=run_dir / "cluster.yaml",
        created_at_s=time.time(),
        version=raytide_version(),
        owner_pid=0 if owner is None else owner.pid,
        owner_start_time=0 if owner is None else owner.start_time,
        monitoring=monitoring,
    )
    cluster.save()
    cluster.temp_dir.mkdir(mode=0o700)
    cluster.ray_token_file.touch(mode=0o600)
    cluster.ray_token_file.write_text(secrets.token_hex(32))
    grant_access(cluster)
    return cluster, claimed


def _places(k: int) -> list[tuple[str, int]]:
    """Returns the hosts and ports that must be free for the head. Ports that depend on K must be free on all addresses,
    because Ray's client server also listens on 127.0.0.1, which the users of this machine share."""
    shared = (GCS_PORT_BASE, AGENT_PORT_BASE, CLIENT_PORT_BASE)
    own = (DASHBOARD_PORT, API_PORT, SERVE_PORT)
    return [*((ANY, base + k) for base in shared), *((f"127.0.{k}.1", port) for port in own)]


def _end_everything(cluster: LocalCluster) -> None:
    """Ends the supervisor and its children, then every process with the cluster's mark.

    A full disk does not stop it: costs that cannot be recorded now are booked when the books are closed.
    """
    cluster.client_file.unlink(missing_ok=True)
    cluster.gateway_file.unlink(missing_ok=True)
    cluster.alertmanager_token_file.unlink(missing_ok=True)
    end_children(cluster)
    try:
        if any((cluster.run_dir / name).exists() for name in (HOSTS_FOLDER, SLURM_FOLDER)):
            end_nodes(provider(cluster, only_ends=True), time.monotonic() + _HOSTS_END_S)
    finally:
        _end_processes(cluster)


def _end_processes(cluster: LocalCluster) -> None:
    live = [folder for folder in node_folders(cluster.run_dir) if folder.end() is None]
    for folder in live:
        with suppress(OSError):
            folder.announce_end("terminated")
    kill_marked(MARK, cluster.cluster_id)
    for folder in live:
        with suppress(OSError):
            folder.record_end(SystemClock().now_s())
    with suppress(OSError, shutil.Error):
        _keep_ray_logs(cluster)
    shutil.rmtree(cluster.temp_dir, ignore_errors=True)


def _keep_ray_logs(cluster: LocalCluster) -> None:
    for logs in cluster.ray_temp_dir.glob("session_2*/logs"):
        shutil.copytree(logs, cluster.logs_dir / "ray", dirs_exist_ok=True)


def _close_books(cluster: LocalCluster) -> Closed:
    """Books the cost of every node up to its end, and ends all records."""
    opened = closing(Store.open(cluster.state_url))
    with opened as store, full_disk_is_an_error(str(cluster.run_dir)), sole_lead(store, cluster.holder):
        return close_books(store, bill(cluster).machines(), SystemClock().now_s())


def _set_aside(cluster: LocalCluster) -> Path:
    """Renames the run folder of an earlier cluster, with its ledger and logs, to a name with the cluster's creation
    time. Returns the new path."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(cluster.created_at_s))
    return cluster.run_dir.rename(cluster.run_dir.with_name(f"{cluster.name}@{stamp}-{cluster.cluster_id[-4:]}"))


def _keep_measurements(earlier: Path, cluster: LocalCluster) -> None:
    """Moves the data of Prometheus and Alertmanager from the run folder `earlier` to this cluster's run folder."""
    with suppress(FileNotFoundError):
        (earlier / cluster.monitoring_dir.name).rename(cluster.monitoring_dir)


@contextmanager
def _exclusive(name: str) -> Iterator[None]:
    """Locks the name against concurrent `up` and `down`."""
    folder = run_dir_of(name).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with hold_lock(folder / f".{name}.lock"):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C inside the block, so that a second Ctrl-C cannot leave a cluster half ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_name(name: str) -> None:
    if not name or not all(char.isalnum() or char in "-_" for char in name) or len(name) > 40:
        raise UsageError(f"{name!r} is not a cluster name.", hint="Use letters, digits, `-` and `_`, at most 40.")
