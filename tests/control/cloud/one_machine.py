"""A cloud on this machine, as one of Ray's `external` providers: 127.0.K.1 is the head, each further machine the next.

A machine is its address: what runs there carries STANDIN_IP in its environment, and dies with it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider

from raytide.core.io.process import kill_marked


class OneMachine(NodeProvider):
    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._path = Path(provider_config["state"])

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        found = self._load()
        return [ip for ip, tags in found.items() if tags is not None and tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        return self._load().get(node_id) is not None

    def is_terminated(self, node_id: str) -> bool:
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._load()[node_id] or {}

    def external_ip(self, node_id: str) -> str:
        return node_id

    internal_ip = external_ip

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        with self._alone():
            found = self._load()
            ip = f"127.0.{self.provider_config['k']}.{len(found) + 1}"
            self._save(found | {ip: dict(tags)})
        return {ip: {}}

    def create_node_with_resources_and_labels(
        self, node_config: dict[str, Any], tags: dict[str, str], count: int, resources: Any, labels: Any
    ) -> dict[str, Any]:
        return self.create_node(node_config, tags, count)

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        with self._alone():
            found = self._load()
            found[node_id] = (found[node_id] or {}) | tags
            self._save(found)

    def terminate_node(self, node_id: str) -> None:
        with self._alone():
            self._save(self._load() | {node_id: None})
        kill_marked("STANDIN_IP", node_id)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """`ray up`, the controller and its threads share the file."""
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _load(self) -> dict[str, dict[str, str] | None]:
        """None is a machine that is gone: its address is not given out again."""
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def _save(self, found: dict[str, dict[str, str] | None]) -> None:
        self._path.with_suffix(".new").write_text(json.dumps(found))
        self._path.with_suffix(".new").replace(self._path)
