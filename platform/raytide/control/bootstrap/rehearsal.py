"""`ray up` and the set-up of a worker, by Ray's own code, on machines that only write down what is done to them."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.node_provider import NodeProvider

from raytide.autoscaler.providers.cloud.setup import RAY_TOKEN, start_commands
from raytide.control.bootstrap.exposure import uses_token
from raytide.core import ray_internals
from raytide.core.errors import ClusterError
from raytide.core.objects.node import NodeType

__all__ = ["Step", "dry_run"]

_HEAD_IP, _NODE_ID = "HEAD_IP", "node-1"


@dataclass(frozen=True, slots=True)
class Step:
    machine: str
    """The node type."""
    what: str
    """`buy`, `copy` or `run`."""
    text: str


def dry_run(file: Mapping[str, Any], node_types: tuple[NodeType, ...]) -> list[Step]:
    """What would be done to the head and to one node of each type. Nothing is asked of the cloud."""
    os.environ.setdefault("RAY_USAGE_STATS_PROMPT_ENABLED", "0")  # a question that nobody would see
    config = ray_internals.prepared_config(file)
    head = _Cloud(config, str(config["head_node_type"]))
    steps = _quietly(head, lambda: ray_internals.set_up_head(head, config))
    for node_type in node_types:
        steps += _worker(config, node_type)
    return steps


def _worker(config: Mapping[str, Any], node_type: NodeType) -> list[Step]:
    cloud = _Cloud(config, node_type.name)
    cloud.create_node(config["available_node_types"][node_type.name]["node_config"], {}, 1)
    has_token = uses_token(config, "head")
    commands = start_commands(config, _HEAD_IP, _NODE_ID, node_type, node_type.zones[0], has_token=has_token)
    if has_token:  # the file is on the head alone
        cloud.note("copy", f"{RAY_TOKEN} to {RAY_TOKEN}")
    return _quietly(cloud, lambda: ray_internals.set_up_worker(cloud, config, _NODE_ID, node_type.name, commands, None))


def _quietly(cloud: _Cloud, act: Any) -> list[Step]:
    """Ray prints its progress; it is shown only when something goes wrong."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            act()
    except Exception as error:  # Ray's launcher raises whatever the step at hand does
        raise ClusterError(
            f"Ray's launcher gave up: {error}\n{printed.getvalue().strip()[-2000:]}", hint="Correct the file."
        ) from error
    return cloud.steps


class _Cloud(NodeProvider):
    """One machine, which is there as soon as it is asked for."""

    def __init__(self, config: Mapping[str, Any], node_type: str) -> None:
        super().__init__({}, str(config["cluster_name"]))
        self.steps: list[Step] = []
        self._node_type = node_type
        self._tags: dict[str, dict[str, str]] = {}

    def note(self, what: str, text: str) -> None:
        self.steps.append(Step(self._node_type, what, text))

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        return list(self._tags)

    def is_running(self, node_id: str) -> bool:
        return True

    def is_terminated(self, node_id: str) -> bool:
        return False

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags[node_id]

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        self._tags[node_id] |= tags

    def external_ip(self, node_id: str) -> str:
        return _HEAD_IP

    internal_ip = external_ip

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        self.note("buy", json.dumps(node_config, sort_keys=True))
        self._tags[_NODE_ID] = dict(tags)

    def get_command_runner(self, *args: Any, **kwargs: Any) -> CommandRunnerInterface:
        return _Runner(self)


class _Runner(CommandRunnerInterface):
    def __init__(self, cloud: _Cloud) -> None:
        self._cloud = cloud

    def run(
        self, cmd: str | None = None, *_: Any, environment_variables: dict[str, object] | None = None, **__: Any
    ) -> str:
        self._cloud.note("run", ray_internals.with_environment(cmd or "", environment_variables or {}))
        return ""

    def run_rsync_up(self, source: str, target: str, options: dict[str, Any] | None = None) -> None:
        """The file that Ray writes for the occasion has another name each time."""
        self._cloud.note("copy", f"{'this file' if 'ray-bootstrap-' in source else source} to {target}")

    def run_init(self, *, as_head: bool, file_mounts: dict[str, str], sync_run_yet: bool) -> bool | None:
        return None
