"""The record of a running cluster, embedded or on the head of a cloud: its run folder, addresses and processes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raytide.control.supervision.log_rotation import KEPT_FILES, MOST_BYTES
from raytide.core.config import Config, home
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.io.environment import ON_NODES, all_passed, passed
from raytide.core.io.process import Process
from raytide.core.objects.cluster_config import load_cluster

__all__ = [
    "AGENT_PORT_BASE",
    "GCS_PORT_BASE",
    "MARK",
    "RAY_ENVIRONMENT",
    "HeadCluster",
    "LocalCluster",
    "RunningCluster",
    "installed_version",
    "load",
    "run_dir_of",
]

MARK = "RAYTIDE_CLUSTER"
"""Environment variable of every process of a cluster; its value is the cluster's id."""


GCS_PORT_BASE, AGENT_PORT_BASE = 6379, 8266
"""Each cluster's is this + K: the GCS listens on every address of the machine, and the agent of the head, which starts
the drivers of jobs, on 127.0.0.1 too. An agent that cannot have both takes no jobs, for good.
"""

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # some of Ray's ports are open on every address: nobody gets in without ray_token_file
    "RAY_enable_autoscaler_v2": "1",  # without it the GCS does not report demand
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would put replicas and trainers behind everything else
    "RAY_ROTATION_MAX_BYTES": str(MOST_BYTES),  # each log of Ray's own, as those of raytide
    "RAY_ROTATION_BACKUP_COUNT": str(KEPT_FILES),
    # A killed raylet refuses connections: dead after 5 refusals, 1 s apart. One that is only slow has 5 times 10 s.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}

_FOREIGN = ("RAY_", "RAYTIDE_NODE", "RAYTIDE_API", "RAYTIDE_TOKEN")
"""Not inherited: `up` may itself run inside a Ray job, or inside another cluster's."""


class RunningCluster(Config):
    """`cluster.json` of a run folder. LocalCluster and HeadCluster say what differs between them."""

    name: str
    cluster_id: str
    run_dir: Path
    gcs_address: str
    dashboard_url: str
    api_url: str
    serve_url: str
    state_url: str
    config_path: Path
    """The cluster.yaml it was started with: a copy in the run folder."""
    created_at_s: float
    version: str
    owner_pid: int = 0
    owner_start_time: int = 0
    """The process with which the cluster ends, if there is one: see `raytide.control.bootstrap.owner_watch`."""

    @property
    def head_ip(self) -> str:
        return self.gcs_address.rpartition(":")[0]

    @property
    def holder(self) -> str:
        """The name of its controller, for a store that other clusters may use too."""
        return f"{self.cluster_id}@{socket.gethostname()}"

    @property
    def tokens_file(self) -> Path:
        """{token: {user, team}}"""
        return self.run_dir / "tokens.json"

    @property
    def client_file(self) -> Path:
        """{address, token}; there while the cluster is up."""
        return self.run_dir / "client.json"

    @property
    def ray_token_file(self) -> Path | None:
        """Whoever can read it may do anything in this cluster's Ray; None when Ray asks nobody for a token."""
        raise NotImplementedError

    @property
    def ray_access(self) -> dict[str, str]:
        """With this environment, `ray status`, `ray job submit` and `ray.init()` find the cluster and may enter it."""
        access = {"RAY_ADDRESS": self.gcs_address, "RAY_API_SERVER_ADDRESS": self.dashboard_url}
        if self.ray_token_file is not None:
            access |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file)}
        return access

    @property
    def ray_headers(self) -> dict[str, str]:
        """For requests to Ray's dashboard."""
        token = self.ray_token_file
        return {} if token is None else {"Authorization": f"Bearer {token.read_text().strip()}"}

    @property
    def logs_dir(self) -> Path:
        return self.run_dir / "logs"

    def log(self, what: str) -> Path:
        return self.logs_dir / f"{what}.log"

    def process(self, what: str) -> Process | None:
        """The recorded process (head, supervisor, controller, api), dead or alive."""
        return Process.read(self.run_dir / "pids" / f"{what}.json")

    def is_alive(self, what: str) -> bool:
        process = self.process(what)
        return process is not None and process.alive

    def environment(self) -> dict[str, str]:
        """What raytide's own processes inherit: all that the operator has, cloud credentials too."""
        raise NotImplementedError

    def with_cluster_mark(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited` with what makes a process one of this cluster's. This interpreter leads PATH: jobs start as
        `python`."""
        return {
            **inherited,
            MARK: self.cluster_id,
            "RAYTIDE_HOME": str(home().resolve()),
            "RAYTIDE_CLUSTER_NAME": self.name,
            "PATH": _led_by(str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)),
            "PYTHONPATH": _led_by(_import_root(), inherited.get("PYTHONPATH", "")),
            "PYTHONUNBUFFERED": "1",
            "SPT_NOENV": "1",  # else Ray writes process titles over the environment, and MARK is no longer to be seen
        }

    def save(self) -> None:
        write_json(self.run_dir / "cluster.json", self.model_dump(mode="json"))


class LocalCluster(RunningCluster):
    """It owns 127.0.K.* on this machine: K.1 is the head, each node has its own K.N."""

    k: int
    temp_dir: Path
    """Open to raytide's user alone. Short, because a unix socket's path has at most 107 characters."""

    @property
    def ray_temp_dir(self) -> Path:
        """Ray's session, sockets and logs. Ray lets everybody write into this folder and those below it."""
        return self.temp_dir / "r"

    @property
    def agent_address(self) -> str:
        """The head's dashboard agent, which starts the drivers of jobs."""
        return f"{self.head_ip}:{AGENT_PORT_BASE + self.k}"

    @property
    def ray_token_file(self) -> Path:
        return self.run_dir / "ray_token"

    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        return self.with_cluster_mark({**inherited, **RAY_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file)})

    def node_environment(self) -> dict[str, str]:
        """What Ray's head and the nodes inherit, and with them drivers, trainers, replicas and scripts."""
        named = all_passed(load_cluster(self.config_path).settings.pass_environment)
        rays = {"RAY_AUTH_TOKEN_PATH": str(self.ray_token_file), **RAY_ENVIRONMENT}
        return {**passed(self.environment(), ON_NODES, named), **rays}


class HeadCluster(RunningCluster):
    """Ray is not raytide's here: whoever started it says in RAY_AUTH_MODE whether it asks for a token, or by putting
    one into Ray's usual place."""

    @property
    def ray_token_file(self) -> Path | None:
        mode = os.environ.get("RAY_AUTH_MODE")
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        return file if (file.exists() if mode is None else mode.lower() == "token") else None

    def environment(self) -> dict[str, str]:
        return self.with_cluster_mark(
            {key: value for key, value in os.environ.items() if key != "RAY_CLOUD_INSTANCE_ID"}
        )


def run_dir_of(name: str) -> Path:
    return home().resolve() / "clusters" / name


def load(run_dir: Path) -> RunningCluster | None:
    """The cluster that has this run folder, up or not; None when there is none."""
    record = read_json(run_dir / "cluster.json")
    if record is None:
        return None
    kind: type[RunningCluster] = LocalCluster if "k" in record else HeadCluster
    return kind.parse(record, where=str(run_dir / "cluster.json"))


def installed_version() -> str:
    try:
        return version("raytide")
    except PackageNotFoundError:
        return "0+checkout"


def _import_root() -> str:
    """The folder that holds the package `raytide`, for interpreters into which it was not installed."""
    return str(Path(__file__).parents[3])


def _led_by(first: str, path: str) -> str:
    rest = [part for part in path.split(os.pathsep) if part and part != first]
    return os.pathsep.join([first, *rest])
