"""Nodes as pods of a RayCluster: raytide patches the worker groups, KubeRay's operator does the rest.

A node type is a worker group. The operator is told how many pods a group has and which to delete, never one without
the other, since it deletes any when only the number falls. Everything is derived from what was bought and which pods
there are, so a call that was lost is made good by the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.providers.kube_api import KubeApi
from raytide.autoscaler.providers.purchases import Purchase, Purchases
from raytide.core.clock import Clock
from raytide.core.errors import ConfigError, ProviderError
from raytide.core.fleet import Node, NodeType

__all__ = ["NODE_LABEL", "KubeRayProvider"]

NODE_LABEL = "raytide.io/node-id"
_LABEL_PATH = "/metadata/labels/raytide.io~1node-id"
_POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class _Pod:
    name: str
    group: str
    node_id: str
    """Empty until it is given to a node."""
    address: str


class KubeRayProvider:
    """`cluster` is the RayCluster's name; its spec has `enableInTreeAutoscaling: false`."""

    def __init__(self, api: KubeApi, cluster: str, run_dir: Path, clock: Clock) -> None:
        self._api, self._cluster, self._clock = api, cluster, clock
        self._purchases = Purchases(run_dir / "purchases")
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def launch(self, node: Node, node_type: NodeType) -> None:
        with self._lock:
            if self._purchases.is_over(node.id):
                return
            index, group = self._group(node.type)
            is_new = self._purchases.find(node.id) is None
            if is_new and len(self._open(node.type)) >= int(group.get("maxReplicas", 2**31 - 1)):
                raise ProviderError(
                    f"worker group {node.type} is at its maxReplicas.", hint="Raise it in the RayCluster."
                )
            self._purchases.record(Purchase(node.id, node.type, node.zone, node.price_micro_usd_h, self._clock.now_s()))
            self._align(index, group, self._pods())

    def terminate(self, node_id: str) -> None:
        with self._lock:
            purchase = self._purchases.find(node_id)
            if purchase is None:
                return
            self._purchases.end(node_id, self._clock.now_s(), "terminated")
            self._align(*self._group(purchase.node_type), self._pods())

    def machines(self) -> tuple[Machine, ...]:
        with self._lock:
            pods, now_s = self._give_out(self._pods()), self._clock.now_s()
            mine = {pod.node_id: pod for pod in pods if pod.node_id}
            live = []
            for purchase in self._purchases.open():
                pod = mine.get(purchase.node_id)
                if pod is None and self._purchases.was_seen(purchase.node_id):
                    self._purchases.end(purchase.node_id, now_s, "its pod is gone")
                else:
                    live.append(purchase.machine(pod.address if pod else "", ray_id=pod.name if pod else ""))
            for index, group in enumerate(self._groups()):
                self._align(index, group, pods)
            return tuple(sorted([*self._purchases.over(), *live], key=lambda m: (m.started_at_s, m.node_id)))

    def notices(self) -> tuple[Notice, ...]:
        """None: Kubernetes evicts pods, and KubeRay drains the Ray node of one that ends."""
        return ()

    def prices(self) -> Mapping[tuple[str, str], int]:
        return {}

    def watch(self, on_change: Callable[[], None]) -> None:
        """Look at the pods every five seconds."""
        self._watcher = threading.Thread(target=self._look, args=(on_change,), name="kuberay", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join(_POLL_S + 1.0)
        self._api.close()

    def _look(self, on_change: Callable[[], None]) -> None:
        before: set[str] | None = None
        while not self._stop.wait(_POLL_S):
            try:
                now = {pod.name for pod in self._pods()}
            except ProviderError:
                continue  # the controller's own look says so
            if before is not None and now != before:
                on_change()
            before = now

    def _align(self, index: int, group: dict[str, Any], pods: list[_Pod]) -> None:
        """Tell the operator how many pods the group has, and which are not among them."""
        name = group["groupName"]
        wanted = {purchase.node_id for purchase in self._open(name)}
        spare = [pod.name for pod in pods if pod.group == name and pod.node_id and pod.node_id not in wanted]
        unnamed = [pod.name for pod in pods if pod.group == name and not pod.node_id]
        waiting = len(wanted) - sum(pod.group == name and pod.node_id in wanted for pod in pods)
        spare += unnamed[max(waiting, 0) :]
        told = (int(group.get("replicas") or 0), sorted(group.get("scaleStrategy", {}).get("workersToDelete", [])))
        if told == (len(wanted), sorted(spare)):
            return
        at = f"/spec/workerGroupSpecs/{index}"
        patch: list[dict[str, object]] = [
            {"op": "test", "path": f"{at}/groupName", "value": name},
            {"op": "add", "path": f"{at}/replicas", "value": len(wanted)},
            {"op": "add", "path": f"{at}/scaleStrategy", "value": {"workersToDelete": sorted(spare)}},
        ]
        self._api.patch_cluster(self._cluster, patch)
        group |= {"replicas": len(wanted), "scaleStrategy": {"workersToDelete": sorted(spare)}}

    def _give_out(self, pods: list[_Pod]) -> list[_Pod]:
        """Give each new pod to the oldest node of its group that has none; the pod's label says so for ever."""
        taken = {pod.node_id for pod in pods}
        given = []
        for pod in pods:
            waiting = [p for p in self._open(pod.group) if p.node_id not in taken]
            waiting = [p for p in waiting if not self._purchases.was_seen(p.node_id)]
            if not pod.node_id and waiting:
                node_id = waiting[0].node_id
                self._api.patch_pod(pod.name, [{"op": "add", "path": _LABEL_PATH, "value": node_id}])
                taken.add(node_id)
                pod = _Pod(pod.name, pod.group, node_id, pod.address)
            if pod.node_id:
                self._purchases.see(pod.node_id)
            given.append(pod)
        return given

    def _pods(self) -> list[_Pod]:
        """Those that stay, oldest first."""
        found = [pod for pod in self._api.workers(self._cluster) if "deletionTimestamp" not in pod["metadata"]]
        found.sort(key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
        return [
            _Pod(
                pod["metadata"]["name"],
                pod["metadata"]["labels"]["ray.io/group"],
                pod["metadata"]["labels"].get(NODE_LABEL, ""),
                pod.get("status", {}).get("podIP", ""),
            )
            for pod in found
        ]

    def _open(self, group: str) -> list[Purchase]:
        bought = [purchase for purchase in self._purchases.open() if purchase.node_type == group]
        return sorted(bought, key=lambda purchase: (purchase.started_at_s, purchase.node_id))

    def _groups(self) -> list[dict[str, Any]]:
        spec = self._api.cluster(self._cluster)["spec"]
        if spec.get("enableInTreeAutoscaling"):
            raise ConfigError(
                f"RayCluster {self._cluster} runs Ray's own autoscaler too.",
                hint="Set spec.enableInTreeAutoscaling to false: two autoscalers undo each other's work.",
            )
        groups: list[dict[str, Any]] = spec.get("workerGroupSpecs", [])
        return groups

    def _group(self, name: str) -> tuple[int, dict[str, Any]]:
        groups = self._groups()
        found = next((index for index, group in enumerate(groups) if group["groupName"] == name), None)
        if found is None:
            raise ConfigError(
                f"RayCluster {self._cluster} has no worker group {name}.",
                hint=f"It has: {', '.join(group['groupName'] for group in groups) or 'none'}.",
            )
        return found, groups[found]
