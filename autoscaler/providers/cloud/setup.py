"""Sets up a new machine as a node of the cluster. Ray's updater copies the files and runs the set-up and start commands
of cluster.yaml over ssh.

Each worker is started with raytide's node id and labels. raytide finds the worker in Ray's reports by this id and
these labels.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from raytide.autoscaler.providers.notices.watch import CLOUDS
from raytide.autoscaler.ray_gcs import RayNode
from raytide.core import ray_internals
from raytide.core.logs import logger
from raytide.core.objects.node import NodeType

AT_ONCE = 16
RAY_TOKEN = "~/.ray/auth_token"  # where it is, not what it is  # nosec B105
"""Ray's default path of its token."""

log = logger(__name__)


class SetUp:
    """The set-up that turns a bought machine into a node of the cluster. The methods of this base class do nothing. The
    base class is used by callers that only terminate machines.
    """

    def begin(self, cloud_id: str, node_id: str, node_type: NodeType, zone: str) -> None:
        """Starts the set-up in the background, unless it is in progress or has succeeded."""

    def failures(self) -> Mapping[str, str]:
        """Returns the error of each node whose last set-up failed, by node id."""
        return {}


class CloudSetUp(SetUp):
    """Sets up each machine in a thread of its own, at most AT_ONCE machines at a time.

    The threads are daemons, so a process can end while they run. The next controller starts unfinished set-ups again.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        cloud: Any,
        head_ip: str,
        in_ray: Callable[[], Iterable[RayNode]],
        *,
        token_file: Path | None = None,
        process_runner: Any = subprocess,
    ) -> None:
        if token_file is not None:
            config = with_token(config, token_file)
        self._has_token = token_file is not None
        self._config, self._cloud, self._head_ip, self._runner = config, cloud, head_ip, process_runner
        self._in_ray = in_ray
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._under_way: dict[str, threading.Thread] = {}
        self._done: set[str] = set()
        self._failures: dict[str, str] = {}

    def begin(self, cloud_id: str, node_id: str, node_type: NodeType, zone: str) -> None:
        with self._lock:
            running = self._under_way.get(node_id)
            if node_id in self._done or (running is not None and running.is_alive()):
                return
            arguments = (cloud_id, node_id, node_type, zone)
            thread = threading.Thread(target=self._do, args=arguments, name=f"set-up-{node_id}", daemon=True)
            self._under_way[node_id] = thread
            thread.start()

    def failures(self) -> Mapping[str, str]:
        with self._lock:
            return dict(self._failures)

    def wait(self, node_id: str, timeout_s: float) -> bool:
        """Waits for the set-up to end, for at most `timeout_s`. Returns True if it succeeded."""
        self._under_way[node_id].join(timeout_s)
        return node_id in self._done

    def _do(self, cloud_id: str, node_id: str, node_type: NodeType, zone: str) -> None:
        commands = start_commands(self._config, self._head_ip, node_id, node_type, zone, has_token=self._has_token)
        with self._places:
            try:
                if any(node.node_id == node_id and node.is_alive for node in self._in_ray()):
                    # the start commands end Ray, and the work on it
                    log.warning(
                        "a node joined Ray with its set-up unfinished; it is left as is", extra={"node": node_id}
                    )
                else:
                    ray_internals.set_up_worker(
                        self._cloud, self._config, cloud_id, node_type.name, commands, self._runner
                    )
                with self._lock:
                    self._done.add(node_id)
                    self._failures.pop(node_id, None)
            except Exception as error:  # Ray's updater raises whatever its commands do
                log.warning("a machine could not be set up", extra={"node": node_id, "error": str(error)})
                with self._lock:
                    self._failures[node_id] = str(error)


def with_token(config: Mapping[str, Any], token_file: Path | str) -> dict[str, Any]:
    """Returns the configuration, with the head's Ray token added to the files that are copied to a worker."""
    return {**config, "file_mounts": {**(config.get("file_mounts") or {}), RAY_TOKEN: str(token_file)}}


def start_commands(
    config: Mapping[str, Any], head_ip: str, node_id: str, node_type: NodeType, zone: str, *, has_token: bool = False
) -> list[str]:
    """Returns the commands that start Ray on a worker, with raytide's environment variables set for each command.

    The first commands are the `worker_start_ray_commands` of cluster.yaml. On a cloud that gives notices, another
    command starts the notice watcher. If the node has GPUs, one more command starts the metrics exporter.
    """
    variables = {
        "RAY_HEAD_IP": head_ip,
        "RAY_NODE_TYPE_NAME": node_type.name,
        "RAY_CLOUD_INSTANCE_ID": node_id,
        "RAY_OVERRIDE_LABELS": json.dumps(node_type.all_labels(zone), sort_keys=True),
        "RAY_OVERRIDE_RESOURCES": json.dumps(node_type.resources, sort_keys=True),
    }
    if has_token:
        variables["RAY_AUTH_MODE"] = "token"
    exports = "".join(f"export {name}='{value}'; " for name, value in variables.items())
    commands = [*config["worker_start_ray_commands"]]
    if (cloud := config["provider"]["type"]) in CLOUDS:
        commands.append(f"raytide watch-notices {cloud}")
    if node_type.resources.get("GPU"):
        commands.append("raytide export-metrics")
    return [exports + command for command in commands]
