"""A Kubernetes API server for one RayCluster, and KubeRay's operator as far as it makes and deletes worker pods.

Every patch is checked against the RayCluster schema (the worker groups' part of the CRD `rayclusters.ray.io`, v1). The
operator counts as KubeRay's raycluster_controller.go does: a pod that is on its way out counts, unless it is named.
"""

from __future__ import annotations

import json
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jsonschema

WORKER_GROUP = {
    "type": "object",
    "required": ["groupName", "maxReplicas", "minReplicas", "rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {
        "groupName": {"type": "string"},
        "replicas": {"type": "integer", "minimum": 0},
        "minReplicas": {"type": "integer"},
        "maxReplicas": {"type": "integer"},
        "numOfHosts": {"type": "integer"},
        "rayStartParams": {"type": "object", "additionalProperties": {"type": "string"}},
        "template": {"type": "object"},
        "scaleStrategy": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "workersToDelete": {"type": "array", "items": {"type": "string"}},
                "multihostReplicasToDelete": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}


LEAVES_AT = "1970-01-01T00:17:30Z"
"""The time at which every pod that is deleted is killed: 1,050 s."""


class KubeServer:
    """`operate` is the operator's turn, `reap` the kubelets'. It refuses what makes the real operator delete a pod at
    random."""

    def __init__(self, groups: dict[str, int], *, in_tree: bool = False) -> None:
        self.cluster: dict[str, Any] = {
            "metadata": {"name": "tide", "namespace": "ml"},
            "spec": {
                "enableInTreeAutoscaling": in_tree,
                "workerGroupSpecs": [
                    {
                        "groupName": name,
                        "minReplicas": 0,
                        "maxReplicas": most,
                        "rayStartParams": {},
                        "template": {"spec": {"containers": []}},
                    }
                    for name, most in groups.items()
                ],
            },
        }
        self.pods: dict[str, dict[str, Any]] = {}
        self.taints: dict[str, list[dict[str, str]]] = {}
        self.patches = 0
        self.fail_next: list[int] = []
        self._made = 0
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def group(self, name: str) -> dict[str, Any]:
        return next(group for group in self.cluster["spec"]["workerGroupSpecs"] if group["groupName"] == name)

    def names(self, group: str) -> list[str]:
        return [name for name, pod in self.pods.items() if pod["metadata"]["labels"]["ray.io/group"] == group]

    def operate(self) -> None:
        with self._lock:
            for group in self.cluster["spec"]["workerGroupSpecs"]:
                name, named = group["groupName"], group.get("scaleStrategy", {}).get("workersToDelete", [])
                for pod in named:
                    self.evict(pod)
                missing = group.get("replicas", 0) - len(set(self.names(name)) - set(named))
                assert missing >= 0, f"{-missing} pods of {name} would be deleted at random"
                for _ in range(missing):
                    self._make(name)

    def evict(self, pod: str) -> None:
        """Delete it with a grace, in which it is still listed."""
        if pod in self.pods:
            self.pods[pod]["metadata"].setdefault("deletionTimestamp", LEAVES_AT)

    def reap(self) -> None:
        """The graces are over."""
        self.pods = {name: pod for name, pod in self.pods.items() if "deletionTimestamp" not in pod["metadata"]}

    def taint(self, pod: str, key: str) -> None:
        """Mark the machine under a pod."""
        self.taints.setdefault(self.pods[pod]["spec"]["nodeName"], []).append({"key": key, "effect": "NoSchedule"})

    def _make(self, group: str) -> None:
        self._made += 1
        name = f"tide-{group}-worker-{self._made:03d}"
        labels = {"ray.io/cluster": "tide", "ray.io/node-type": "worker", "ray.io/group": group}
        self.pods[name] = {
            "metadata": {"name": name, "labels": labels, "creationTimestamp": f"2026-01-01T00:00:{self._made:02d}Z"},
            "spec": {"nodeName": f"machine-{self._made}"},
            "status": {"podIP": f"10.0.0.{self._made}"},
        }

    def get(self, path: str) -> dict[str, Any]:
        if "/pods" in path:
            return {"items": list(self.pods.values())}
        if path == "/api/v1/nodes":
            machines = sorted({pod["spec"]["nodeName"] for pod in self.pods.values()})
            spec = {name: {"taints": self.taints[name]} if name in self.taints else {} for name in machines}
            return {"items": [{"metadata": {"name": name}, "spec": spec[name]} for name in machines]}
        return self.cluster

    def patch(self, path: str, patch: list[dict[str, Any]]) -> dict[str, Any]:
        with self._lock:
            if "/pods/" in path:
                name = path.rsplit("/", 1)[1]
                self.pods[name] = _patched(self.pods[name], patch)
                return self.pods[name]
            cluster = _patched(self.cluster, patch)
            for group in cluster["spec"]["workerGroupSpecs"]:
                jsonschema.validate(group, WORKER_GROUP)
            self.cluster = cluster
            self.patches += 1
            return cluster


def _patched(document: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """RFC 6902, as far as `test` and `add` of existing parents."""
    after = deepcopy(document)
    for operation in patch:
        *parents, last = [
            part.replace("~1", "/").replace("~0", "~") for part in operation["path"].removeprefix("/").split("/")
        ]
        at: Any = after
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if operation["op"] == "test":
            assert at[last] == operation["value"], operation
        else:
            assert operation["op"] == "add", operation
            at[last] = operation["value"]
    return after


def _handler(kube: KubeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(lambda: kube.get(self.path))

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json-patch+json"
            self._answer(lambda: kube.patch(self.path, body))

        def _answer(self, make: Any) -> None:
            if kube.fail_next:
                self._send(kube.fail_next.pop(), {"message": "not now"})
                return
            try:
                self._send(200, make())
            except (AssertionError, KeyError, jsonschema.ValidationError) as error:
                self._send(422, {"message": str(error)})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
