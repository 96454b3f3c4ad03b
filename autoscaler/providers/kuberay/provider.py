"""Nodes as pods of a RayCluster. raytide patches the worker groups, and KubeRay's operator creates and deletes the
pods.

A node type is a worker group. The patch sets the number of pods of each group and lists the pods to delete. The
operator counts terminating pods as pods of the group. If the group then has more pods than the number in the patch,
the operator deletes an arbitrary pod. To prevent this, every patch repeats the list of pods to delete, until
Kubernetes no longer lists these pods. Every patch is computed anew from purchase records and listed pods. If a call
is lost, the next call therefore makes up for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from raytide.autoscaler.providers.base import Machine, Notice, Provider
from raytide.autoscaler.providers.kuberay.kube_api import KubeApi
from raytide.autoscaler.providers.poll import PollWatcher
from raytide.autoscaler.providers.purchases import PurchaseRecord, Purchases, in_order
from raytide.core.clock import Clock
from raytide.core.errors import ConfigError, ProviderError
from raytide.core.objects.node import Node, NodeType

NODE_LABEL = "raytide.io/node-id"
_LABEL_PATH = "/metadata/labels/raytide.io~1node-id"
_POLL_S = 5.0

TAINTS: Mapping[str, float] = {
    "cloud.google.com/impending-node-termination": 30.0,
    "aws-node-termination-handler/spot-itn": 120.0,
    "aws-node-termination-handler/asg-lifecycle-termination": 120.0,
    "aws-node-termination-handler/scheduled-maintenance": 600.0,
    "aws-node-termination-handler/rebalance-recommendation": 600.0,
    "karpenter.sh/disrupted": 120.0,
    "ToBeDeletedByClusterAutoscaler": 120.0,
}
"""Taints of machines that will be removed, with the least time in seconds that their pods stay."""


@dataclass(frozen=True, slots=True)
class _Pod:
    name: str
    group: str
    node_id: str
    """The node's id; empty until the pod is assigned to a node."""
    address: str
    machine: str
    """The Kubernetes node on which the pod runs."""
    leaves_at_s: float | None
    """The time at which Kubernetes kills the pod; None while the pod stays."""


class KubeRayProvider(Provider):
    """Creates and deletes pods of a RayCluster.

    `cluster` is the name of the RayCluster. The spec of the RayCluster must have `enableInTreeAutoscaling: false`.
    """

    def __init__(self, api: KubeApi, cluster: str, run_dir: Path, clock: Clock) -> None:
        self._api, self._cluster, self._clock = api, cluster, clock
        self._purchases = Purchases(run_dir / "purchases")
        self._lock = threading.Lock()
        self._watcher: PollWatcher | None = None
        self._tainted_s: dict[tuple[str, str], float] = {}
        """The time at which each (machine, taint) was first seen."""
        self._looked_s = 0.0

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
            self._purchases.buy(node, self._clock.now_s())
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
            assigned = {pod.node_id: pod for pod in pods if pod.node_id}
            live = []
            for purchase in self._purchases.open():
                pod = assigned.get(purchase.node_id)
                if pod is None and self._purchases.was_seen(purchase.node_id):
                    self._purchases.end(purchase.node_id, now_s, "its pod is gone")
                else:
                    live.append(purchase.machine(pod.address if pod else "", ray_id=pod.name if pod else ""))
            for index, group in enumerate(self._groups()):
                self._align(index, group, pods)
            return in_order([*self._purchases.over(), *live])

    def notices(self) -> tuple[Notice, ...]:
        """Returns notices for terminating pods, and for pods on machines that have one of the taints in TAINTS."""
        with self._lock:
            pods = [pod for pod in self._pods() if pod.node_id]
            ending_machines = self._going_machines() if pods else {}
            deadlines = {pod.node_id: pod.leaves_at_s or ending_machines.get(pod.machine) for pod in pods}
            return tuple(Notice(node_id, at_s) for node_id, at_s in sorted(deadlines.items()) if at_s is not None)

    def watch(self, on_change: Callable[[], None]) -> None:
        """Polls the pods every five seconds."""
        self._watcher = PollWatcher(
            "kuberay", _POLL_S, lambda: {(pod.name, pod.leaves_at_s) for pod in self._pods()}, on_change
        )

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        self._api.close()

    def _going_machines(self) -> dict[str, float]:
        """Returns the deadline of each machine with one of TAINTS, counted from when the taint was first seen."""
        now_s = self._clock.now_s()
        if now_s - self._looked_s >= _POLL_S:
            marked = [
                (node["metadata"]["name"], taint["key"])
                for node in self._api.nodes()
                for taint in node["spec"].get("taints", [])
                if taint["key"] in TAINTS
            ]
            self._tainted_s = {each: self._tainted_s.get(each, now_s) for each in marked}
            self._looked_s = now_s
        ending_machines: dict[str, float] = {}
        wall_ahead_s = self._clock.wall_ahead_s()
        for (machine, taint), since_s in self._tainted_s.items():
            deadline_s = since_s + TAINTS[taint] + wall_ahead_s
            ending_machines[machine] = min(ending_machines.get(machine, float("inf")), deadline_s)
        return ending_machines

    def _align(self, index: int, group: dict[str, Any], pods: list[_Pod]) -> None:
        """Patches the number of pods of the group, and the pods to delete."""
        name = group["groupName"]
        own = [pod for pod in pods if pod.group == name]
        leaving = {pod.node_id for pod in own if pod.leaves_at_s is not None}
        wanted = {purchase.node_id for purchase in self._open(name)} - leaving
        spare = [pod.name for pod in own if pod.leaves_at_s is not None or (pod.node_id and pod.node_id not in wanted)]
        unnamed = [pod.name for pod in own if not pod.node_id and pod.leaves_at_s is None]
        waiting = len(wanted) - sum(pod.node_id in wanted for pod in own)
        spare += unnamed[max(waiting, 0) :]
        # a name stays in the patch after its pod is gone, since the operator's own list may be older
        listed = {pod.name for pod in own}
        named = sorted(listed.intersection(group.get("scaleStrategy", {}).get("workersToDelete", [])))
        if (int(group.get("replicas") or 0), named) == (len(wanted), sorted(spare)):
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
        """Assigns each new pod to the oldest node of its group without one, by a label on the pod."""
        taken = {pod.node_id for pod in pods}
        waiting = {group: [p.node_id for p in self._open(group)] for group in {pod.group for pod in pods}}
        waiting = {
            group: [each for each in ids if each not in taken and not self._purchases.was_seen(each)]
            for group, ids in waiting.items()
        }
        given = []
        for pod in pods:
            if not pod.node_id and pod.leaves_at_s is None and waiting[pod.group]:
                node_id = waiting[pod.group].pop(0)
                self._api.patch_pod(pod.name, [{"op": "add", "path": _LABEL_PATH, "value": node_id}])
                pod = replace(pod, node_id=node_id)
            if pod.node_id:
                self._purchases.see(pod.node_id)
            given.append(pod)
        return given

    def _pods(self) -> list[_Pod]:
        """Returns all pods that Kubernetes lists, oldest first."""
        found = self._api.workers(self._cluster)
        found.sort(key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
        return [_pod(pod["metadata"], pod.get("spec", {}), pod.get("status", {})) for pod in found]

    def _open(self, group: str) -> list[PurchaseRecord]:
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
        for group in groups:
            if group.get("minReplicas"):
                raise ConfigError(
                    f"worker group {group['groupName']} has minReplicas {group['minReplicas']}.",
                    hint="Set it to 0: the operator would create pods on its own. cluster.yaml has min_workers.",
                )
            if group.get("numOfHosts", 1) > 1:
                raise ConfigError(
                    f"worker group {group['groupName']} has numOfHosts {group['numOfHosts']}.",
                    hint="Set it to 1, and let gangs ask for several members: a node is one pod, but the operator "
                    "would create and delete several per replica.",
                )
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


def _pod(metadata: dict[str, Any], spec: dict[str, Any], status: dict[str, Any]) -> _Pod:
    leaves_at = metadata.get("deletionTimestamp")
    return _Pod(
        name=metadata["name"],
        group=metadata["labels"]["ray.io/group"],
        node_id=metadata["labels"].get(NODE_LABEL, ""),
        address=status.get("podIP", ""),
        machine=spec.get("nodeName", ""),
        leaves_at_s=datetime.fromisoformat(leaves_at).timestamp() if leaves_at else None,
    )
