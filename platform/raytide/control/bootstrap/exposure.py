"""Checks that neither a cluster.yaml nor a running cluster opens Ray to others.

Ray runs any code for its callers. So Ray must use a token if others can reach its address. Ray's dashboard accepts
jobs, so the dashboard must listen on loopback only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from raytide.core.errors import ClusterError, ConfigError
from raytide.core.io.environment import is_loopback

_START = re.compile(r"\bray\s+start\b")
_MODE = re.compile(r"\bRAY_AUTH_MODE=[\"']?(\w*)")
_DASHBOARD_HOST = re.compile(r"--dashboard-host[=\s]+[\"']?([^\s\"']+)")
_TIMEOUT_S = 10.0


def check_file(file: Mapping[str, Any], *, where: str) -> None:
    """Raises ConfigError if the `ray start` commands of this cluster.yaml start Ray without a token. Also raises
    ConfigError if they let Ray's dashboard listen on an address other than loopback.
    """
    problems = [
        f"{role}_start_ray_commands start Ray without its token"
        for role in ("head", "worker")
        if _starts_ray(file, role) and not uses_token(file, role)
    ]
    start = _strings(file.get("head_start_ray_commands"))
    hosts = {host for text in start if _START.search(text) for host in _DASHBOARD_HOST.findall(text)}
    problems += [
        f"Ray's dashboard would listen on {host}, and it accepts any job"
        for host in sorted(hosts)
        if not is_loopback(host)
    ]
    if problems:
        raise ConfigError(
            f"{where}: {'; '.join(problems)}.",
            hint="Use `RAY_AUTH_MODE=token ray start` without --dashboard-host, as the shipped cluster.yaml does. "
            "If no other user can reach these machines: `raytide up --insecure`.",
        )


def uses_token(file: Mapping[str, Any], role: str) -> bool:
    """Returns whether the commands that start Ray for this role (head or worker) set RAY_AUTH_MODE to `token`, and
    never to another value."""
    docker = file.get("docker") if isinstance(file.get("docker"), Mapping) else {}
    sources = [file.get(key) for key in ("initialization_commands", "setup_commands")]
    sources += [file.get(f"{role}_setup_commands"), file.get(f"{role}_start_ray_commands")]
    sources += [docker.get(key) for key in ("run_options", f"{role}_run_options")]  # type: ignore[union-attr]
    modes = {mode.lower() for source in sources for text in _strings(source) for mode in _MODE.findall(text)}
    return modes == {"token"}


def check_running(gcs_address: str, dashboard_url: str) -> None:
    """Raises ClusterError if other machines can reach this Ray's dashboard, or can reach Ray without a token."""
    if is_loopback(gcs_address.rpartition(":")[0]):
        return
    problems = []
    try:
        with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as http:
            mode = http.get(f"{dashboard_url}/api/authentication_mode").json()["authentication_mode"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        mode = "unknown"
    if mode == "disabled" or mode == "unknown":
        problems.append(f"does not require a token (its authentication mode is {mode})")
    host = urlsplit(dashboard_url).hostname or ""
    if not is_loopback(host):
        problems.append(f"has its dashboard, which accepts any job, on {host}")
    if problems:
        raise ClusterError(
            f"Ray at {gcs_address} {' and '.join(problems)}.",
            hint="Start it with `RAY_AUTH_MODE=token ray start --head` and without --dashboard-host. "
            "If no other user can reach this machine: `raytide head --insecure`.",
        )


def _starts_ray(file: Mapping[str, Any], role: str) -> bool:
    return any(_START.search(text) for text in _strings(file.get(f"{role}_start_ray_commands")))


def _strings(value: object) -> Iterable[str]:
    if isinstance(value, str):
        return (value,)
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list | tuple) else ()
