"""Reads Ray's cluster state and drains nodes, directly through Ray's GCS.

A call takes about a millisecond and needs no driver connection. The GCS knows logical resources only. utilization.py
reads physical use from each node's agent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from raytide.core.errors import ClusterError
from raytide.core.objects.node import Node, NodeState, Resources
from raytide.core.objects.snapshot import Demand
from raytide.core.ray_internals import (
    GcsClient,
    autoscaler_messages,
    combine_bundles,
    gcs_client,
    label_in_operator,
    strict_pack,
)


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node as Ray sees it. Every raylet is started with an instance id, which links the node to raytide's record."""

    ray_node_id: str
    """Ray's id, in hex."""
    node_id: str
    """raytide's id; empty for the head and for foreign nodes."""
    is_alive: bool = True
    is_draining: bool = False
    total: Resources = field(default_factory=dict)
    available: Resources = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""
    idle_ms: int = 0
    """Ray's own idle time. It restarts whenever work queues anywhere (ray#60546), so decisions use `IdleClock`."""
    activity: tuple[str, ...] = ()
    """Ray's reasons why the node is busy. Ray keeps them when the node becomes idle, so they count only while `idle_ms`
    is 0.
    """

    @property
    def is_busy(self) -> bool:
        is_used = any(self.available.get(name, 0.0) < amount for name, amount in self.total.items())
        return is_used or (bool(self.activity) and self.idle_ms == 0)


T = TypeVar("T")
_Key = tuple[tuple[tuple[str, float], ...], tuple[tuple[str, str], ...], str, str, str]
"""One shape of demand: resources and labels; for bundles that belong together, their shared label and their group's id;
for bundles that must be apart, the label that nodes with one of them carry."""

CALL_TIMEOUT_S = 5.0
_NAMESPACE = b"raytide"
"""The namespace of raytide's entries in the GCS."""
NODE_ID_LABEL = "ray.io/node-id"
_PINNED = (NODE_ID_LABEL, "raytide.io/node-id")
_ENDLESS = 1e18
_OF_GROUP = re.compile(r".+_group_(\d+_)?[0-9a-f]{36}")
"""The names of resources inside a placement group, `CPU_group_0_<id>`: work that needs these waits for its group, not
for a node. Other names with `_group_`, such as `node_group_west`, are operators' own.
"""


class GcsReader:
    """Reads nodes and demand from Ray's GCS.

    The first call connects to the GCS. After an error, the next call connects anew, so the reader also finds a GCS
    that was restarted.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: GcsClient | None = None

    def nodes(self) -> tuple[RayNode, ...]:
        """Returns every node that Ray knows, including dead nodes and the head. The head has an empty `node_id`."""
        return tuple(_node(state) for state in self._state().node_states)

    def demand(self) -> tuple[Demand, ...]:
        """Returns Ray's demand. The first entries are Ray's pending tasks, actors and placement groups, for which a new
        node may have room. The other entries are the resources that `request_resources` asks for.

        raytide's own placement groups are pinned to nodes, so they are left out.
        """
        state = self._state()
        found: dict[_Key, int] = {}
        for pending in state.pending_resource_requests:
            _count(found, pending.request, pending.count)
        for gang in state.pending_gang_resource_requests:
            for request in combine_bundles(_bundles(gang)):
                _count(found, request, 1, _together(gang), gang.details)
        requested: dict[_Key, int] = {}
        for constraint in state.cluster_resource_constraints:
            for each in constraint.resource_requests:
                _count(requested, each.request, each.count)
        return (*_demands(found), *(replace(each, is_standing=True) for each in _demands(requested)))

    def metrics_addresses(self) -> dict[str, str]:
        """Returns the `host:port` at which Ray's agent on each live node serves metrics. The keys are instance ids, and
        `head` for the head.
        """
        nodes = self._call("list Ray's nodes", lambda client: client.get_all_node_info(timeout=CALL_TIMEOUT_S))
        return {
            name: f"{node.node_manager_address}:{node.metrics_export_port}"
            for node in nodes.values()
            if node.state == node.ALIVE
            and node.metrics_export_port
            and (name := node.instance_id or ("head" if node.is_head_node else ""))
        }

    def drain(self, ray_node_id: str, kind: Literal["idle", "notice"], deadline_s: float, why: str) -> bool:
        """Asks Ray to place no more work on the node. Returns False if Ray refuses: Ray refuses an "idle" drain of a
        node with work.
        """
        reasons = {
            "idle": autoscaler_messages().DrainNodeReason.DRAIN_NODE_REASON_IDLE_TERMINATION,
            "notice": autoscaler_messages().DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION,
        }

        def call(client: GcsClient) -> bool:
            accepted, _ = client.drain_node(ray_node_id, reasons[kind], why, int(deadline_s * 1000), CALL_TIMEOUT_S)
            return bool(accepted)

        return self._call("drain a node", call)

    def report(self, nodes: Iterable[Node]) -> None:
        """Reports pending and failed nodes to Ray. `ray status` and Ray's dashboard show them."""
        seen = self._state().cluster_resource_state_version
        state = autoscaler_messages().AutoscalingState(
            last_seen_cluster_resource_state_version=seen, autoscaler_state_version=seen + 1
        )
        for node in nodes:
            if node.state in (NodeState.REQUESTED, NodeState.LAUNCHING):
                state.pending_instances.add(
                    instance_type_name=node.type, ray_node_type_name=node.type, instance_id=node.id, details=node.reason
                )
            elif node.state is NodeState.GONE and node.ready_at_s is None and node.ended_at_s is not None:
                state.failed_instance_requests.add(
                    instance_type_name=node.type,
                    ray_node_type_name=node.type,
                    count=1,
                    reason=node.reason,
                    start_ts=int(node.requested_at_s),
                    failed_ts=int(node.ended_at_s),
                )
        self._call("report to Ray", lambda client: client.report_autoscaling_state(state.SerializeToString()))

    def _state(self) -> Any:
        body = self._call("read Ray's cluster state", lambda client: client.get_cluster_resource_state(CALL_TIMEOUT_S))
        reply = autoscaler_messages().GetClusterResourceStateReply()
        reply.ParseFromString(body)
        return reply.cluster_resource_state

    def _call(self, what: str, call: Callable[[GcsClient], T]) -> T:
        try:
            if self._client is None:
                self._client = gcs_client(self._address)
            return call(self._client)
        except Exception as error:  # Ray raises RpcError, ConnectionError and bare RuntimeErrors here
            self._client = None
            raise ClusterError(
                f"cannot {what} at {self._address}: {error}", hint="`raytide status` shows whether the head runs."
            ) from error


class GcsEntries:
    """Entries under one prefix in the key-value store of Ray's GCS. Processes on nodes write entries, and the
    controller reads them.

    `connect` returns a GCS client. It is called again after any error, to reach a restarted GCS.
    """

    def __init__(self, prefix: str, connect: Callable[[], GcsClient]) -> None:
        self._prefix, self._connect = prefix.encode(), connect
        self._client: GcsClient | None = None

    def put(self, name: str, body: bytes) -> None:
        self._call(lambda gcs: gcs.internal_kv_put(self._key(name), body, True, _NAMESPACE, CALL_TIMEOUT_S))

    def remove(self, name: str) -> None:
        self._call(lambda gcs: gcs.internal_kv_del(self._key(name), False, _NAMESPACE, CALL_TIMEOUT_S))

    def all(self) -> dict[str, bytes]:
        """Returns the contents of all entries, by the entries' names."""
        keys = self._call(lambda gcs: gcs.internal_kv_keys(self._prefix, _NAMESPACE, CALL_TIMEOUT_S))
        if not keys:
            return {}
        bodies = self._call(lambda gcs: gcs.internal_kv_multi_get(keys, _NAMESPACE, CALL_TIMEOUT_S))
        start = len(self._prefix)
        return {key[start:].decode(errors="replace"): body for key, body in bodies.items()}

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _call(self, ask: Callable[[GcsClient], Any]) -> Any:
        try:
            self._client = self._client or self._connect()
            return ask(self._client)
        except Exception as error:  # Ray raises RpcError, ConnectionError and bare RuntimeErrors here
            self._client = None
            raise ClusterError(f"Ray's GCS does not answer: {error}", hint="Is the head up?") from error


def _node(state: Any) -> RayNode:
    status = autoscaler_messages().NodeStatus
    return RayNode(
        ray_node_id=state.node_id.hex(),
        node_id=state.instance_id,
        is_alive=state.status != status.DEAD,
        is_draining=state.status == status.DRAINING,
        total=_resources(state.total_resources),
        available=_resources(state.available_resources),
        labels={**state.dynamic_labels, **state.labels},
        address=state.node_ip_address,
        idle_ms=state.idle_duration_ms,
        activity=tuple(state.node_activity),
    )


def _demands(found: Mapping[_Key, int]) -> Iterator[Demand]:
    for key, count in sorted(found.items()):
        resources, labels, together, _, apart = key
        yield Demand(dict(resources), dict(labels), count, together, apart)


def _resources(amounts: Mapping[str, float]) -> dict[str, float]:
    """Returns the resources without the markers that Ray adds to every node and placement group."""
    return {k: v for k, v in sorted(amounts.items()) if not _OF_GROUP.fullmatch(k) and not k.startswith("node:")}


def _asked(amounts: Mapping[str, float]) -> dict[str, float]:
    """Returns the amounts rounded to Ray's precision. `request_resources` validates nothing, so NaN and negative
    amounts count as 0, infinite ones as more than any node has.
    """
    rounded = {name: max(0.0, round(amount, 4)) for name, amount in _resources(amounts).items()}
    return {name: min(amount, _ENDLESS) for name, amount in rounded.items()}


def _bundles(gang: Any) -> Iterable[Any]:
    """Returns the bundles of a group; `requests` is the old form, without label selectors."""
    return tuple(gang.bundle_selectors[0].resource_requests if gang.bundle_selectors else gang.requests)


def _together(gang: Any) -> str:
    """Returns the label of `topology_strategy={label: "STRICT_PACK"}`, or ""."""
    if not gang.bundle_selectors or not gang.bundle_selectors[0].HasField("locality_requirement"):
        return ""
    constraint = gang.bundle_selectors[0].locality_requirement.locality_constraint
    return str(constraint.label_name) if constraint.placement_strategy == strict_pack() else ""


def _count(found: dict[_Key, int], request: Any, count: int, together: str = "", group: str = "") -> None:
    labels = _labels(request.label_selectors)
    if any(key in labels for key in _PINNED) or any(map(_OF_GROUP.fullmatch, request.resources_bundle)):
        return
    resources = tuple(sorted(_asked(request.resources_bundle).items()))
    marks = [each.anti_affinity.label_name for each in request.placement_constraints if each.HasField("anti_affinity")]
    key = resources, tuple(sorted(labels.items())), together, group if together else "", marks[0] if marks else ""
    found[key] = found.get(key, 0) + count


def _labels(selectors: Any) -> dict[str, str]:
    """Returns the first label selector (the others are fallbacks), with sorted values, since Ray shuffles them."""
    labels = {}
    for constraint in selectors[0].label_constraints if selectors else ():
        values = sorted(constraint.label_values)
        body = values[0] if len(values) == 1 else f"in({','.join(values)})"
        labels[constraint.label_key] = body if constraint.operator == label_in_operator() else f"!{body}"
    return labels
