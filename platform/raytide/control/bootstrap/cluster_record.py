"""What any running cluster consists of, embedded or on a cloud's head: its run folder, addresses and processes."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from raytide.core.config import Config, home
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.io.process import Process

__all__ = ["MARK", "RunningCluster", "installed_version", "load", "run_dir_of"]

MARK = "RAYTIDE_CLUSTER"
"""Environment variable of every process of a cluster; its value is the cluster's id."""


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
    """The process with which the cluster ends, if there is one: see `raytide.control.supervision.owner`."""

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


def run_dir_of(name: str) -> Path:
    return home().resolve() / "clusters" / name


def load(run_dir: Path) -> RunningCluster | None:
    """The cluster that has this run folder, up or not; None when there is none."""
    from raytide.control.bootstrap.cluster_record import HeadCluster, LocalCluster

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
