"""The record of a running cluster: its run folder, addresses and processes. The cluster is embedded or has a head on a
cloud."""

from __future__ import annotations

import os
import site
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from raytide.control.supervision.log_rotation import KEPT_FILES, MOST_BYTES
from raytide.core.config import Config, home
from raytide.core.io.atomic_file import read_json, write_json
from raytide.core.io.environment import ON_NODES, all_passed, passed
from raytide.core.io.process import Process
from raytide.core.objects.cluster_config import load_cluster

MARK = "RAYTIDE_CLUSTER"
"""The environment variable that marks every process of a cluster; its value is the cluster's id."""


PROMETHEUS_PORT, ALERTMANAGER_PORT = 7490, 7493
"""The ports of Prometheus and Alertmanager. They differ from the default ports, which others on this machine may
use."""

GCS_PORT_BASE, AGENT_PORT_BASE, CLIENT_PORT_BASE = 6379, 8266, 9600
"""The base ports, to which cluster K adds K. They differ between clusters, because the GCS listens on all addresses of
the machine, and the head's agent, which starts the drivers of jobs, also on 127.0.0.1. An agent that cannot bind both
never takes jobs.
"""

RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # some of Ray's ports are open on all addresses
    "RAY_enable_autoscaler_v2": "1",  # without it the GCS does not report demand
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 would put replicas and trainers behind everything else
    "RAY_ROTATION_MAX_BYTES": str(MOST_BYTES),  # applies to each of Ray's logs
    "RAY_ROTATION_BACKUP_COUNT": str(KEPT_FILES),
    # A killed raylet refuses connections: dead after 5 refusals, 1 s apart. A slow one has 5 times 10 s.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}

_FOREIGN = ("RAY_", "RAYTIDE_NODE", "RAYTIDE_API", "RAYTIDE_TOKEN")
"""Variables (prefixes) that are not inherited, because `up` may run inside a Ray job or another cluster."""


class RunningCluster(Config):
    """The content of `cluster.json` in a run folder. The base class of LocalCluster and HeadCluster."""

    name: str
    cluster_id: str
    run_dir: Path
    gcs_address: str
    dashboard_url: str
    api_url: str
    serve_url: str
    state_url: str
    config_path: Path
    """The cluster's own copy of cluster.yaml, in the run folder."""
    created_at_s: float
    version: str
    owner_pid: int = 0
    owner_start_time: int = 0
    """The start time of the process `owner_pid`, whose end ends the cluster; 0 without one. See
    `raytide.control.bootstrap.owner_watch`.
    """
    monitoring: bool = False
    """True if Prometheus and Alertmanager run beside the cluster."""
    head_name: str = ""
    """The name of this machine among the heads of the cluster; the host name if empty."""
    head_epoch: int = 0
    """The epoch of this machine's lead over other heads; 0 in a cluster with one head."""
    shared_dir: Path | None = None
    """The folder that all heads see, if there are several."""

    @property
    def head_ip(self) -> str:
        return self.gcs_address.rpartition(":")[0]

    @property
    def holder(self) -> str:
        """The name under which this cluster's controller leads. It is unique among the clusters that may use the same
        store."""
        return f"{self.cluster_id}@{self.head_name or socket.gethostname()}"

    @property
    def tokens_file(self) -> Path:
        """The file with the API's tokens as JSON. A user's token has an entry {token: {user, team}}. The token of a
        gateway or of Alertmanager has an entry {token: {role: ...}}."""
        return (self.shared_dir or self.run_dir) / "tokens.json"

    @property
    def client_file(self) -> Path:
        """The JSON file with the API's address and the operator's token. Clients of this user read the file to reach
        the API. The file exists while the cluster is up.
        """
        return self.run_dir / "client.json"

    @property
    def gateway_file(self) -> Path:
        """The file {address, token} with which gateways reach the API. The token opens only the gateways' routes."""
        return self.run_dir / "gateway.json"

    @property
    def alertmanager_token_file(self) -> Path:
        """The file with Alertmanager's API token. The token opens only the webhook for alerts."""
        return self.run_dir / "alertmanager.token"

    @property
    def monitoring_dir(self) -> Path:
        """The folder with the configuration and data of Prometheus and Alertmanager."""
        return self.run_dir / "monitoring"

    @property
    def loopback_ip(self) -> str:
        """An IP address of the head. Other machines cannot reach this address."""
        return "127.0.0.1"

    @property
    def prometheus_url(self) -> str:
        return f"http://{self.loopback_ip}:{PROMETHEUS_PORT}"

    @property
    def alertmanager_url(self) -> str:
        return f"http://{self.loopback_ip}:{ALERTMANAGER_PORT}"

    @property
    def ray_token_file(self) -> Path | None:
        """The file with Ray's token, or None if Ray uses no token. The token gives full access to this cluster's
        Ray."""
        raise NotImplementedError

    @property
    def ray_access(self) -> dict[str, str]:
        """Environment variables with which `ray status`, `ray job submit` and `ray.init()` connect to the cluster."""
        access = {"RAY_ADDRESS": self.gcs_address, "RAY_API_SERVER_ADDRESS": self.dashboard_url}
        if self.ray_token_file is not None:
            access |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file)}
        return access

    @property
    def ray_headers(self) -> dict[str, str]:
        """The HTTP headers that authenticate requests to Ray's dashboard."""
        token = self.ray_token_file
        return {} if token is None else {"Authorization": f"Bearer {token.read_text().strip()}"}

    @property
    def logs_dir(self) -> Path:
        return self.run_dir / "logs"

    def log(self, what: str) -> Path:
        return self.logs_dir / f"{what}.log"

    def process(self, what: str) -> Process | None:
        """Returns the recorded process, such as `head`, `supervisor` or `api`, dead or alive. Returns None if none is
        recorded."""
        return Process.read(self.run_dir / "pids" / f"{what}.json")

    def is_alive(self, what: str) -> bool:
        process = self.process(what)
        return process is not None and process.alive

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of raytide's own processes. They include the operator's variables, with any
        cloud credentials."""
        raise NotImplementedError

    def with_cluster_mark(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables `inherited` together with the variables of the cluster's processes. The folder of this
        Python interpreter is first on PATH, because jobs start as `python`."""
        return {
            **inherited,
            MARK: self.cluster_id,
            "RAYTIDE_HOME": str(home().resolve()),
            "RAYTIDE_CLUSTER_NAME": self.name,
            "PATH": _led_by(str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)),
            "PYTHONPATH": _led_by(_import_root(), inherited.get("PYTHONPATH", "")),
            "PYTHONUNBUFFERED": "1",
            "SPT_NOENV": "1",  # else Ray's process titles overwrite the environment and MARK
        }

    def save(self) -> None:
        write_json(self.run_dir / "cluster.json", self.model_dump(mode="json"))


class LocalCluster(RunningCluster):
    """An embedded cluster, which owns the addresses 127.0.K.* of this machine. The head has 127.0.K.1, and each node
    has another 127.0.K.N."""

    k: int
    temp_dir: Path
    """A folder for Ray that only raytide's user can access. Its path is short, because paths of unix sockets have at
    most 107 characters.
    """

    @property
    def loopback_ip(self) -> str:
        return self.head_ip

    @property
    def ray_temp_dir(self) -> Path:
        """The folder of Ray's session, sockets and logs. Ray gives all users write access to this folder and to the
        folders below it.
        """
        return self.temp_dir / "r"

    @property
    def agent_address(self) -> str:
        """The address of the head's dashboard agent, which starts the drivers of jobs."""
        return f"{self.head_ip}:{AGENT_PORT_BASE + self.k}"

    @property
    def ray_token_file(self) -> Path:
        return self.run_dir / "ray_token"

    def environment(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        return self.with_cluster_mark({**inherited, **RAY_ENVIRONMENT, "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file)})

    def node_environment(self) -> dict[str, str]:
        """Returns the environment variables of Ray's head and nodes. Drivers, trainers, replicas and scripts inherit
        them."""
        named = all_passed(load_cluster(self.config_path).settings.pass_environment)
        rays = {"RAY_AUTH_TOKEN_PATH": str(self.ray_token_file), **RAY_ENVIRONMENT}
        return {**passed(self.environment(), ON_NODES, named), **rays}


class HeadCluster(RunningCluster):
    """A cluster that is not embedded. With several heads, Ray uses the token in the folder that the heads share. With
    one head, raytide did not start Ray, and follows Ray's own rules. If RAY_AUTH_MODE is `token`, Ray uses the token
    file in Ray's usual place. If RAY_AUTH_MODE is not set, Ray uses this file only if it exists. For any other value,
    Ray uses no token.
    """

    @property
    def ray_token_file(self) -> Path | None:
        if self.shared_dir is not None:
            return self.shared_dir / "ray_token"
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
    """Returns the cluster that is recorded in this run folder, whether or not it runs. Returns None if the folder has
    no record."""
    record = read_json(run_dir / "cluster.json")
    if record is None:
        return None
    kind: type[RunningCluster] = LocalCluster if "k" in record else HeadCluster
    return kind.parse(record, where=str(run_dir / "cluster.json"))


def _import_root() -> str:
    """Returns the folder of the package `raytide`, for interpreters in which it is not installed. Returns an empty text
    if it is installed: on PYTHONPATH, all packages beside it would shadow those of a script's own environment.
    """
    folder = str(Path(__file__).parents[3])
    installed = (*site.getsitepackages(), site.getusersitepackages())
    return "" if os.path.realpath(folder) in map(os.path.realpath, installed) else folder


def _led_by(first: str, path: str) -> str:
    rest = [part for part in path.split(os.pathsep) if part and part != first]
    return os.pathsep.join(filter(None, [first, *rest]))
