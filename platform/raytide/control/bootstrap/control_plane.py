"""Starts and ends a cluster's supervisor and the supervisor's children, such as the controller and the API."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence

import httpx

from raytide.autoscaler.providers.base import Machine, Provider
from raytide.control.bootstrap.cluster_record import RunningCluster
from raytide.control.supervision.daemon import spawn
from raytide.control.supervision.supervisor import BACKUP, CHILDREN, MONITORING, arguments
from raytide.core.errors import ClusterError, ConfigError
from raytide.core.io.atomic_file import read_json, write_json, write_text
from raytide.core.io.process import Process, running, terminate_all
from raytide.core.objects.cluster_config import load_cluster

_OPERATOR = {"user": "admin", "team": "*"}
_GATEWAY = {"role": "gateway"}
_ALERTMANAGER = {"role": "alertmanager"}
_POLL_S = 0.5
_STOP_GRACE_S = 12.0
"""The seconds that the supervisor has to end: more than its own grace period for its children."""


def grant_access(cluster: RunningCluster) -> None:
    """Creates the API tokens that do not exist yet, and writes them for the processes that use them. `client.json` gets
    the operator's token, and `gateway.json` the gateways' token. If the cluster runs Alertmanager, Alertmanager's token
    is written to a separate file. All earlier tokens stay valid, including those of users."""
    try:
        tokens = read_json(cluster.tokens_file) or {}
    except ValueError as error:
        raise ConfigError(
            f"{cluster.tokens_file} cannot be read: {error}.",
            hint="Fix it, or move it away: a new one without users is then created.",
        ) from None
    known = dict(tokens)

    def token_of(entry: dict[str, str]) -> str:
        token = next((token for token, each in known.items() if each == entry), None) or secrets.token_urlsafe(24)
        known[token] = entry
        return token

    access = {cluster.client_file: token_of(_OPERATOR), cluster.gateway_file: token_of(_GATEWAY)}
    alertmanagers = token_of(_ALERTMANAGER) if cluster.monitoring else ""
    if known != tokens:
        write_json(cluster.tokens_file, known)
    cluster.tokens_file.chmod(0o600)  # an editor may have replaced it
    for file, token in access.items():
        write_json(file, {"address": cluster.api_url, "token": token})
    if alertmanagers:
        write_text(cluster.alertmanager_token_file, alertmanagers)


def start_supervisor(
    cluster: RunningCluster, children: Mapping[str, str] = CHILDREN, *, pass_fds: Sequence[int] = ()
) -> None:
    argv = [sys.executable, "-m", "raytide.control.supervision.supervisor", str(cluster.run_dir)]
    is_backed_up = load_cluster(cluster.config_path).settings.backup is not None
    more = {**(MONITORING if cluster.monitoring else {}), **(BACKUP if is_backed_up else {})}
    argv += [f"{what}={module}" for what, module in (*children.items(), *more.items())]
    spawn("supervisor", argv, run_dir=cluster.run_dir, environment=cluster.environment(), pass_fds=pass_fds)


def wait_for_api(cluster: RunningCluster, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{cluster.api_url}/health", timeout=2.0, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            pass  # it is starting
        if not cluster.is_alive("supervisor"):
            raise ClusterError(
                f"the supervisor of cluster {cluster.name} ended.", hint=f"See {cluster.log('supervisor')}."
            )
        time.sleep(0.1)
    raise ClusterError(
        f"the API of cluster {cluster.name} did not answer at {cluster.api_url} within {timeout_s:.0f} s.",
        hint=f"See {cluster.log('api')} and {cluster.log('controller')}.",
    )


def end_children(cluster: RunningCluster) -> None:
    """Ends the supervisor and then its children. In this order the supervisor restarts none of them."""
    for whats in (["supervisor"], [*CHILDREN, *MONITORING, *BACKUP]):
        recorded = [process for what in whats if (process := cluster.process(what))]
        terminate_all([*recorded, *_unrecorded(cluster, whats)], grace_s=_STOP_GRACE_S)


def _unrecorded(cluster: RunningCluster, whats: Sequence[str]) -> list[Process]:
    """Returns running children that the supervisor could not record because the disk was full."""
    children = [CHILDREN[what] for what in whats if what in CHILDREN]
    return [process for child in children for process in running(arguments(child, str(cluster.run_dir)))]


def end_nodes(nodes: Provider, deadline: float) -> tuple[Machine, ...]:
    """Terminates nodes repeatedly until the provider lists no running node. One pass may not be enough, because a cloud
    may list a new machine late. Returns all machines that the provider lists, including ended ones. Raises ClusterError
    if some still run at `deadline`, a time of the monotonic clock. Closes the provider.
    """
    try:
        while True:
            live = [machine.node_id for machine in nodes.machines() if machine.ended_at_s is None]
            if not live:
                return nodes.machines()
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"nodes {', '.join(live)} did not end.", hint="Check the cloud's console, or the machines."
                )
            for node_id in live:
                nodes.terminate(node_id)
            time.sleep(_POLL_S)
    finally:
        nodes.close()
