"""The guard of a machine that can be the head of a cluster: it waits for the lease of the head, leads, and steps down.

`raytide head FILE --standby` starts the guard. It waits until the lease has expired or was given up. Then its machine
leads. The guard takes the head's address, and locks the former head's GCS out of Ray's tables in Redis. It starts Ray's
head on these tables, starts the supervisor, and keeps renewing the lease.

The guard steps down if it cannot renew the lease in time, if another machine has taken over, or if Ray ends. To step
down, it ends all of the head's processes on this machine. Then it waits again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from raytide.control.bootstrap.cluster_record import HeadCluster, run_dir_of
from raytide.control.bootstrap.control_plane import end_children, grant_access, start_supervisor
from raytide.control.bootstrap.head.cloud_head import API_PORT, SERVE_PORT, make_run_dir, start_control_plane
from raytide.control.bootstrap.head.ending import DISMISSAL, GUARD, end_processes
from raytide.control.bootstrap.head.ray_start import HEAD_MARK, start_ray, wait_for_ray
from raytide.control.bootstrap.head.redis_users import replace_user
from raytide.control.job_tokens import key_in
from raytide.control.supervision.daemon import hold_lock, record_of, spawn
from raytide.core.config import raytide_version
from raytide.core.errors import ClusterError, ConfigError, ConflictError, RaytideError
from raytide.core.io.atomic_file import create_json, read_json, write_text
from raytide.core.io.process import Process
from raytide.core.logs import log_to, logger
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.hardware.standby import StandbySection
from raytide.core.state import Store
from raytide.core.state.registry.heads import HeadLease

log = logger(__name__)

_SHARED = ("hosts", "slurm", "purchases", "providers", "packages", "files")
"""Folders of the run folder that the next head needs: which machine a node has, the bill, uploads."""
_RAY_S, _API_S, _ADDRESS_S = 120.0, 120.0, 60.0
_RETRY_S = 5.0


class HeadGuard:
    """Runs the guard's loop on one machine that can be the head."""

    def __init__(self, cluster: HeadCluster, *, insecure: bool) -> None:
        self._cluster, self._insecure = cluster, insecure
        self._settings = load_cluster(cluster.config_path).settings
        assert self._settings.standby is not None
        self._section: StandbySection = self._settings.standby
        self._stopping, self._is_lost = threading.Event(), threading.Event()
        self._period_s = min(1.0, self._section.lease_s / 6)

    def stop(self) -> None:
        """Ends the loop. If this machine leads, it gives up the lead. Safe in a signal handler."""
        self._stopping.set()

    def run(self) -> None:
        """Runs the loop. Returns after a call of `stop`, or when the cluster has ended."""
        end_processes(self._cluster.run_dir)  # those of an earlier guard, which has lost the lead by now
        # While this machine waits, the head may be of an earlier release, which could not open an upgraded state again.
        with closing(Store.open(self._cluster.state_url, upgrades=False)) as store:
            is_first = True
            while not self._stopping.is_set():
                lease = store.head_lease(self._cluster.holder, self._section.lease_s)
                if not self._wait_for_lead(lease, is_first=is_first):
                    return
                is_first = False
                self._lead(lease)

    def _wait_for_lead(self, lease: HeadLease, *, is_first: bool) -> bool:
        """Returns True once this machine leads; False if the guard is to end."""
        shown = ""
        while not self._stopping.is_set():
            try:
                if not is_first and lease.has_ended():
                    log.info("the cluster was ended; this machine waits no more")
                    lease.stop_waiting()
                    return False
                leader = lease.take()
                if not leader:
                    log.warning("this machine leads", extra={"epoch": lease.epoch})
                    return True
                lease.report_waiting()
                if leader != shown:
                    log.info("standby: another machine leads", extra={"leader": leader})
                    shown = leader
                if self._cluster.tokens_file.exists() and not self._cluster.client_file.exists():
                    grant_access(self._cluster)  # `raytide status` here asks the head
            except (RaytideError, OSError) as error:
                log.warning("waiting", extra={"error": str(error)})
            is_first = False
            self._stopping.wait(self._period_s)
        try:
            lease.stop_waiting()
        except RaytideError as error:
            log.warning("cannot sign off", extra={"error": str(error)})
        return False

    def _lead(self, lease: HeadLease) -> None:
        """Runs the head until this machine has to step down; then ends its processes and gives up the lease."""
        self._is_lost.clear()
        is_over = threading.Event()
        renewals = threading.Thread(target=self._renew, args=(lease, is_over), name="lease", daemon=True)
        renewals.start()
        failed = True
        try:
            self._lead_until_lost(lease)
            failed = False
        except Exception as error:  # whatever it is, another machine may do better
            log.exception("this head failed", extra={"error": str(error)})
        finally:
            is_over.set()
            if self._stopping.is_set() and not self._is_lost.is_set():
                end_children(self._cluster)
            end_processes(self._cluster.run_dir)
            renewals.join(self._section.lease_s)
            try:
                lease.resign()
            except RaytideError as error:
                log.warning("cannot resign; the lease runs out", extra={"error": str(error)})
            log.warning("this machine does not lead any more")
        if failed:
            self._stopping.wait(_RETRY_S)  # lets another machine try first

    def _lead_until_lost(self, lease: HeadLease) -> None:
        def check() -> None:
            if self._is_lost.is_set() or lease.left_s <= 0:
                raise ConflictError("the lease was lost.", hint="This machine waits now.")
            if self._stopping.is_set():
                raise ConflictError("this machine is to end.", hint="Another one takes over.")

        _take_address(self._section)
        check()
        user = replace_user(self._section, self._cluster.name, lease.epoch)
        cluster = self._cluster.model_copy(update={"head_epoch": lease.epoch})
        check()
        ray = start_ray(cluster, self._settings, user, lease.life)
        url = wait_for_ray(cluster, ray, timeout_s=_RAY_S, check=check)
        cluster = cluster.model_copy(update={"dashboard_url": url})
        cluster.client_file.unlink(missing_ok=True)
        start_control_plane(cluster, insecure=self._insecure, timeout_s=_API_S)
        log.warning("the control plane answers", extra={"api": cluster.api_url})
        while not self._stopping.wait(self._period_s):
            check()
            if not ray.alive:
                raise ClusterError("Ray's head ended.", hint=f"See {cluster.log('ray')}.")
            if not cluster.is_alive("supervisor"):
                start_supervisor(cluster)

    def _renew(self, lease: HeadLease, is_over: threading.Event) -> None:
        while not is_over.wait(self._period_s):
            try:
                lease.renew()
            except ConflictError as error:
                log.error("lost the lead", extra={"error": str(error)})
                self._is_lost.set()
                return
            except (RaytideError, OSError) as error:
                log.warning("cannot renew the lease", extra={"left_s": lease.left_s, "error": str(error)})


def _take_address(section: StandbySection) -> None:
    if not section.take_address:
        return
    try:
        done = subprocess.run(
            section.take_address, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ADDRESS_S
        )
        why = done.stderr.strip()[-300:] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if why:
        raise ClusterError(f"metadata.raytide.standby.take_address failed: {why}.", hint="Correct the command.")


def join(config_path: Path, name: str, *, monitoring: bool = False) -> HeadCluster:
    """Prepares this machine to be a head of the cluster. It creates the run folder, with links into the folder that all
    heads share. The first machine creates the cluster's secrets in the shared folder. Sets the environment variables of
    this process for Ray's token."""
    config = load_cluster(config_path)
    section = config.settings.standby
    if section is None:
        raise ConfigError(
            f"{config_path} has no metadata.raytide.standby.",
            hint="Add address, redis_url and shared_dir (docs/standby.md), or run `raytide head` without --standby.",
        )
    shared = Path(section.shared_dir).expanduser()
    if not shared.is_dir():
        raise ConfigError(
            f"metadata.raytide.standby.shared_dir: {shared} is not a folder here.",
            hint="Mount it on each head; it holds what the next head needs of this one.",
        )
    run_dir = run_dir_of(config.name)
    make_run_dir(run_dir)
    if config_path.resolve() != run_dir / "cluster.yaml":
        shutil.copyfile(config_path, run_dir / "cluster.yaml")
    shared.chmod(0o700)
    create_json(shared / "cluster.json", {"id": f"{config.name}-{secrets.token_hex(6)}", "at_s": time.time()})
    create_json(shared / "ray_token.json", {"token": secrets.token_hex(32)})
    key_in(shared)
    token = (read_json(shared / "ray_token.json") or {})["token"]
    if not (shared / "ray_token").exists():
        write_text(shared / "ray_token", token)
    for folder in _SHARED:
        (shared / folder).mkdir(mode=0o700, exist_ok=True)
    for each in (*_SHARED, "job_key.json"):
        link = run_dir / each
        if not link.is_symlink():
            if link.exists():
                raise ConfigError(
                    f"{link} is from a cluster with one head.",
                    hint=f"End that cluster, and move {link} to {shared / each}.",
                )
            link.symlink_to(shared / each)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(shared / "ray_token"), HEAD_MARK: str(run_dir)}
    known = read_json(shared / "cluster.json") or {}
    return HeadCluster(
        name=config.name,
        cluster_id=known["id"],
        run_dir=run_dir,
        gcs_address=section.gcs_address,
        dashboard_url="",
        api_url=f"http://{section.address}:{API_PORT}",
        serve_url=f"http://{section.address}:{SERVE_PORT}",
        state_url=config.settings.state_url,
        config_path=run_dir / "cluster.yaml",
        created_at_s=known["at_s"],
        version=raytide_version(),
        monitoring=monitoring,
        head_name=name,
        shared_dir=shared,
    )


def start_guard(config_path: Path, name: str, *, insecure: bool, monitoring: bool) -> HeadCluster:
    """Starts the guard in the background. Raises ConflictError if a guard already runs on this machine."""
    cluster = join(config_path, name, monitoring=monitoring)
    running = Process.read(record_of(cluster.run_dir, GUARD))
    if running is not None and running.alive:
        raise ConflictError(
            f"this machine is a head of cluster {cluster.name} already (process {running.pid}).",
            hint=f"`raytide down --name {cluster.name}` ends it.",
        )
    options = [*(["insecure"] if insecure else []), *(["monitoring"] if monitoring else [])]
    argv = [sys.executable, "-m", "raytide.control.bootstrap.head.guard", str(cluster.config_path), name, *options]
    spawn(GUARD, argv, run_dir=cluster.run_dir, environment=cluster.environment())
    return cluster


def run_guard(config_path: Path, name: str, *, insecure: bool, monitoring: bool) -> None:
    """Runs the guard in this process until it is stopped."""
    cluster = join(config_path, name, monitoring=monitoring)
    with hold_lock(cluster.run_dir / "guard.lock"):
        me = Process.of(os.getpid(), GUARD)
        assert me is not None
        guard = HeadGuard(cluster, insecure=insecure)
        heed_signals(guard)
        me.write(record_of(cluster.run_dir, GUARD))
        guard.run()


def heed_signals(guard: HeadGuard) -> None:
    """Installs signal handlers. SIGTERM and SIGINT stop the guard. `DISMISSAL` ends this process at once."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: guard.stop())
    signal.signal(DISMISSAL, lambda *_: os._exit(0))


def main(config_path: str, name: str, *options: str) -> None:
    log_to()
    run_guard(Path(config_path), name, insecure="insecure" in options, monitoring="monitoring" in options)


if __name__ == "__main__":
    main(*sys.argv[1:])
