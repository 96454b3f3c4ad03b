"""Any cloud that Ray's cluster launcher knows, through the NodeProvider that ships with Ray and the file's own
`provider` section. raytide chooses type, zone and time; Ray's code talks to the cloud.

The cloud is asked for what runs by tags, so a controller that was killed finds its machines again. Notices come from
the watcher that runs on each node (raytide.autoscaler.notices), since a cloud tells only the machine itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from raytide.autoscaler.notices.board import NoticeBoard
from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.providers.poll import PollWatcher
from raytide.autoscaler.providers.purchases import Purchase, Purchases, in_order
from raytide.core import ray_internals
from raytide.core.clock import Clock
from raytide.core.errors import ConfigError, ProviderError
from raytide.core.fleet import Node, NodeType

__all__ = ["NODE_TAG", "CloudProvider", "SetUp"]

NODE_TAG, _ZONE_TAG, _PRICE_TAG = "raytide-node-id", "raytide-zone", "raytide-price-micro-usd-h"
_POLL_S = 10.0
_UNLISTED_S = 60.0
"""For how long a cloud may not list what it just sold."""


class SetUp(Protocol):
    """Makes a bought machine a node of the cluster; see `CloudSetUp`."""

    def begin(self, cloud_id: str, node_id: str, node_type: NodeType, zone: str) -> None:
        """Do it in the background, unless it is being done."""


class CloudProvider:
    """`config` is cluster.yaml as `ray up` completes it, `cloud` Ray's NodeProvider for it: see `ray_internals`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        cloud: Any,
        node_types: Iterable[NodeType],
        run_dir: Path,
        clock: Clock,
        set_up: SetUp,
        board: NoticeBoard,
    ) -> None:
        self._config, self._cloud, self._clock = config, cloud, clock
        self._set_up, self._board = set_up, board
        self._purchases = Purchases(run_dir / "purchases")
        self._lock = threading.Lock()
        self._types = {node_type.name: node_type for node_type in node_types}
        self._watcher: PollWatcher | None = None

    def launch(self, node: Node, node_type: NodeType) -> None:
        with self._lock:
            if self._purchases.is_over(node.id):
                return
            cloud_id = self._running().get(node.id)
            if cloud_id is None:
                if self._purchases.find(node.id) is not None:
                    return  # bought, and not listed yet, or no more
                cloud_id = self._create(node)
                self._purchases.record(
                    Purchase(node.id, node.type, node.zone, node.price_micro_usd_h, self._clock.now_s())
                )
        if cloud_id:
            self._set_up.begin(cloud_id, node.id, node_type, node.zone)

    def terminate(self, node_id: str) -> None:
        with self._lock:
            cloud_id = self._running().get(node_id)
            if cloud_id is not None:
                self._ask(f"end {node_id}", lambda: self._cloud.terminate_node(cloud_id))
            elif self._is_unlisted(node_id):
                return  # asked again by the next tick, when the cloud lists it
            if self._purchases.find(node_id) is not None:
                self._purchases.end(node_id, self._clock.now_s(), "terminated")

    def machines(self) -> tuple[Machine, ...]:
        with self._lock:
            running, now_s = self._running(), self._clock.now_s()
            for node_id, cloud_id in running.items():
                self._adopt(node_id, cloud_id, now_s)
            live = []
            for purchase in self._purchases.open():
                if purchase.node_id in running:
                    live.append(purchase.machine(self._address(running[purchase.node_id])))
                elif now_s < purchase.started_at_s + _UNLISTED_S:
                    live.append(purchase.machine())
                else:
                    self._purchases.end(purchase.node_id, now_s, "the cloud took it away")
            return in_order([*self._purchases.over(), *live])

    def notices(self) -> tuple[Notice, ...]:
        """What the nodes' watchers pinned; of machines that have ended nothing stays on the board."""
        pinned = self._board.notices()
        for notice in pinned:
            if self._purchases.is_over(notice.node_id):
                self._board.remove(notice.node_id)
        return tuple(notice for notice in pinned if not self._purchases.is_over(notice.node_id))

    def prices(self) -> Mapping[tuple[str, str], int]:
        return {}

    def watch(self, on_change: Callable[[], None]) -> None:
        """Look at the cloud every ten seconds, since none of Ray's providers can be listened to."""
        self._watcher = PollWatcher("cloud", _POLL_S, self._look, on_change)

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    def _look(self) -> set[str]:
        with self._lock:
            return set(self._running())

    def _is_unlisted(self, node_id: str) -> bool:
        purchase = self._purchases.find(node_id)
        return purchase is not None and self._clock.now_s() < purchase.started_at_s + _UNLISTED_S

    def _running(self) -> dict[str, str]:
        """raytide's node ids to the cloud's."""
        tags = {ray_internals.NODE_KIND_TAG: "worker"}
        ids = self._ask("list the nodes", lambda: self._cloud.non_terminated_nodes(tags))
        found = {self._cloud.node_tags(cloud_id).get(NODE_TAG): cloud_id for cloud_id in ids}
        return {node_id: cloud_id for node_id, cloud_id in found.items() if node_id}

    def _adopt(self, node_id: str, cloud_id: str, now_s: float) -> None:
        """Record a machine that was bought by a controller killed before it could say so; set up what is not."""
        tags = self._cloud.node_tags(cloud_id)
        node_type, zone = tags.get(ray_internals.NODE_TYPE_TAG, ""), tags.get(_ZONE_TAG, "")
        if self._purchases.find(node_id) is None:
            self._purchases.record(Purchase(node_id, node_type, zone, int(tags.get(_PRICE_TAG, 0)), now_s))
        if not ray_internals.is_set_up(tags) and node_type in self._types:
            self._set_up.begin(cloud_id, node_id, self._types[node_type], zone)

    def _create(self, node: Node) -> str:
        """The cloud's id, or nothing where it is not told yet."""
        raw = self._config["available_node_types"][node.type]
        tags = ray_internals.worker_tags(self._config, node.type)
        tags |= {NODE_TAG: node.id, _ZONE_TAG: node.zone, _PRICE_TAG: str(node.price_micro_usd_h)}
        node_config = self._in_zone(dict(raw.get("node_config", {})), node.zone)
        created = self._ask(
            f"buy {node.type} in {node.zone}",
            lambda: self._cloud.create_node_with_resources_and_labels(
                node_config, tags, 1, raw.get("resources", {}), raw.get("labels", {})
            ),
        )
        listed = self._running().get(node.id, "")  # Ray's providers learn a node's tags by listing it
        return listed or next(iter(created or {}), "")

    def _in_zone(self, node_config: dict[str, Any], zone: str) -> dict[str, Any]:
        """Ray's AWS provider chooses a zone itself; this leaves it only one."""
        if self._config["provider"]["type"] == "aws":
            wanted = node_config.get("SubnetIds", [])
            subnets = self._ask(
                "look at the subnets", lambda: self._cloud.ec2.meta.client.describe_subnets(SubnetIds=wanted)["Subnets"]
            )
            mine = [subnet["SubnetId"] for subnet in subnets if subnet["AvailabilityZone"] == zone]
            if not mine:
                raise ConfigError(
                    f"no subnet of this cluster lies in {zone}.",
                    hint=f"Add {zone} to provider.availability_zone, or take it out of the node type's zones.",
                )
            return node_config | {"SubnetIds": mine}
        return node_config

    def _address(self, cloud_id: str) -> str:
        return str(self._ask("ask for an address", lambda: self._cloud.internal_ip(cloud_id)) or "")

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # each cloud's library has errors of its own
            raise ProviderError(
                f"{self._config['provider']['type']} could not {what}: {error}",
                hint="The pool is left alone for a while; another zone or type may have some.",
            ) from error
