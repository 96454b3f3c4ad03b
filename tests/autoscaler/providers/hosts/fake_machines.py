"""Own machines in memory, behind the interface of the ssh connection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from raytide.core.errors import ClusterError, ProviderError
from raytide.core.objects.hardware.host import Host


class FakeMachines:
    """Machines with their nodes. One that is `off` cannot be reached, one that is `sick` refuses to start a node, and
    one that is `slow` starts it and never answers."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self.off: set[str] = set()
        self.sick: set[str] = set()
        self.slow: set[str] = set()
        self.starts: list[tuple[str, str]] = []

    def request(self, host: Host, verb: str, content: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        if host.name in self.off:
            raise ClusterError(f"host {host.name} cannot be reached.")
        here = self.nodes[host.name]
        if verb == "start":
            if host.name in self.sick:
                raise ProviderError(f"host {host.name}: it has ray 2.0 instead of 2.60.")
            self.starts.append((host.name, content["node_id"]))
            started = {"is_running": True, "reason": "", "pid": 100 + len(self.starts), "start_time": 7}
            state = here.setdefault(content["node_id"], started)
            if host.name in self.slow:
                raise ClusterError(f"host {host.name} did not answer within {timeout_s:g} s.")
            return state
        if verb == "end":
            self.die(host.name, content["node_id"], "terminated")
            return {"is_running": False}
        return {"nodes": {node_id: dict(state) for node_id, state in here.items()}}

    def close(self) -> None: ...

    def die(self, host: str, node_id: str, reason: str) -> None:
        if node_id in self.nodes[host]:
            self.nodes[host][node_id] = {"is_running": False, "reason": reason}

    def running(self) -> list[tuple[str, str]]:
        return sorted(
            (host, node_id)
            for host, nodes in self.nodes.items()
            for node_id, state in nodes.items()
            if state["is_running"]
        )
