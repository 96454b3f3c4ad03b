"""What one embedded cluster consists of: its run folder, addresses and environment. `cluster.json` is this model."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raytide.core.config import Config, home
from raytide.core.durable import read_json, write_json
from raytide.core.processes import Process

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
    # A killed raylet refuses connections: dead after 5 refusals, 1 s apart. One that is only slow has 5 times 10 s.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}

_FOREIGN = ("RAY_", "RAYTIDE_NODE", "RAYTIDE_API", "RAYTIDE_TOKEN")
"""Not inherited: `up` may itself run inside a Ray job, or inside another cluster's."""


class LocalCluster(Config):
    """One embedded cluster. It owns 127.0.K.* on this machine: K.1 is the head, each node has its own K.N."""

    name: str
    k: int
    cluster_id: str
    run_dir: Path
    temp_dir: Path
    """Ray's session and sockets: short, because a unix socket's path has at most 107 characters."""
    gcs_address: str
    dashboard_url: str
    api_url: str
    serve_url: str
    state_url: str
    config_path: Path
    """The cluster.yaml it was started with: a copy in the run folder."""
    created_at_s: float
    version: str

    @property
    def head_ip(self) -> str:
        return f"127.0.{self.k}.1"

    @property
    def agent_address(self) -> str:
        """The head's dashboard agent, which starts the drivers of jobs."""
        return f"{self.head_ip}:{AGENT_PORT_BASE + self.k}"

    @property
    def tokens_file(self) -> Path:
        """{token: {user, team}}"""
        return self.run_dir / "tokens.json"

    @property
    def client_file(self) -> Path:
        """{address, token}; there while the cluster is up."""
        return self.run_dir / "client.json"

    @property
    def ray_token_file(self) -> Path:
        """Whoever can read it may do anything in this cluster's Ray."""
        return self.run_dir / "ray_token"

    @property
    def ray_access(self) -> dict[str, str]:
        """With this environment, `ray status`, `ray job submit` and `ray.init()` find the cluster and may enter it."""
        return {
            "RAY_ADDRESS": self.gcs_address,
            "RAY_API_SERVER_ADDRESS": self.dashboard_url,
            "RAY_AUTH_MODE": RAY_ENVIRONMENT["RAY_AUTH_MODE"],
            "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file),
        }

    @property
    def ray_headers(self) -> dict[str, str]:
        """For requests to Ray's dashboard."""
        return {"Authorization": f"Bearer {self.ray_token_file.read_text()}"}

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
        """What every process of this cluster inherits. This interpreter leads PATH: jobs start as `python`."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        return {
            **inherited,
            **RAY_ENVIRONMENT,
            "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file),
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


def run_dir_of(name: str) -> Path:
    return home().resolve() / "clusters" / name


def load(run_dir: Path) -> LocalCluster | None:
    """The cluster that has this run folder, up or not; None when there is none."""
    record = read_json(run_dir / "cluster.json")
    return None if record is None else LocalCluster.parse(record, where=str(run_dir / "cluster.json"))


def installed_version() -> str:
    try:
        return version("raytide")
    except PackageNotFoundError:
        return "0+checkout"


def _import_root() -> str:
    """The folder that holds the package `raytide`, for interpreters into which it was not installed."""
    return str(Path(__file__).parents[2])


def _led_by(first: str, path: str) -> str:
    rest = [part for part in path.split(os.pathsep) if part and part != first]
    return os.pathsep.join([first, *rest])
