"""The files with a replica's output. The replica publishes the files' names in the GCS, and the controller reads the
names.

The files belong to the replica's Ray worker process. The engine's process inherits the worker's output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from raytide.actors.serving.ray_serve.keys import log_prefix
from raytide.core import ray_internals
from raytide.core.objects.endpoint_load import ReplicaLog

MOST_LOGS = 16
"""The number of replicas of an endpoint whose logs are remembered."""


def own_log(began_at_s: float) -> bytes:
    """Returns the log record of this process as JSON: the start time, the node, the address of Ray's agent, and the
    output files.
    """
    import ray

    agent, files = ray_internals.agent_address(), ray_internals.output_files()
    node = ray.get_runtime_context().get_node_id()
    return json.dumps({"began_at_s": began_at_s, "agent": agent, "files": files, "node": node}).encode()


def logs_of(endpoint: str, published: Mapping[bytes, bytes]) -> tuple[ReplicaLog, ...]:
    """Returns the log records of an endpoint's replicas, newest first. `published` maps GCS keys to values."""
    prefix, found = log_prefix(endpoint), []
    for key, value in published.items():
        if key.startswith(prefix):
            fields = json.loads(value)
            files, node = tuple(fields["files"]), fields.get("node", "")
            name = key.removeprefix(prefix).decode()
            found.append(ReplicaLog(name, fields["began_at_s"], fields["agent"], files, node))
    return tuple(sorted(found, key=lambda log: (-log.began_at_s, log.replica)))


def forgotten(endpoint: str, logs: Iterable[ReplicaLog]) -> list[bytes]:
    """Returns the GCS keys of the log records beyond the newest MOST_LOGS. `logs` must be sorted, newest first."""
    return [log_prefix(endpoint) + log.replica.encode() for log in tuple(logs)[MOST_LOGS:]]
