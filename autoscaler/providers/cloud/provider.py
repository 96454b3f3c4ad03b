"""The provider for every cloud that Ray's cluster launcher supports. It uses Ray's own NodeProvider and the `provider`
section of cluster.yaml.

raytide chooses node type, zone and time. Ray's code calls the cloud. Machines are listed by tags, so a restarted
controller finds them again. A cloud sends an interruption notice only to the machine itself, so a watcher on each
node passes the notice on (raytide.autoscaler.providers.notices).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from raytide.autoscaler.providers.base import Machine, Notice
from raytide.autoscaler.providers.cloud.orders import GoogleOrder
from raytide.autoscaler.providers.cloud.setup import SetUp
from raytide.autoscaler.providers.cloud.spot_prices import SpotPrices, instance_types
from raytide.autoscaler.providers.notices.watch import NoticeBoard
from raytide.autoscaler.providers.poll import PollWatcher
from raytide.autoscaler.providers.purchases import PurchaseRecord, Purchases, in_order
from raytide.core import ray_internals
from raytide.core.clock import Clock
from raytide.core.errors import ClusterError, ConfigError, ProviderError, RaytideError
from raytide.core.logs import logger
from raytide.core.objects.node import Node, NodeType

NODE_TAG, _ZONE_TAG, _PRICE_TAG = "raytide-node-id", "raytide-zone", "raytide-price-micro-usd-h"
_POLL_S = 10.0
_ORDERS_S = 5.0
"""The seconds between two polls of the orders, as in Ray."""
_UNLISTED_S = 60.0
"""The time after a purchase for which a cloud may not list the machine yet."""

log = logger(__name__)


class CloudProvider:
    """Buys and ends machines of a cloud through Ray's NodeProvider.

    `config` is the content of cluster.yaml, with the values that `ray up` adds. `cloud` is Ray's NodeProvider for
    this configuration (see `ray_internals`).
    """

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
        self._begun: dict[str, str] = {}
        """The machine of each node whose set-up was begun by this process."""
        self._orders: dict[str, GoogleOrder] = {}
        """The machines that Google is still making, by node id; they are neither listed nor billed."""
        self._refusals: dict[str, ProviderError] = {}
        self._asked_s = -math.inf
        self._given_up: set[str] = set()
        """Nodes terminated while Google was making their machines, which are ended once listed."""
        self._types = {node_type.name: node_type for node_type in node_types}
        self._watcher: PollWatcher | None = None
        self._spot_prices: SpotPrices | None = None
        if config["provider"]["type"] == "aws":
            machines = instance_types(config, self._types.values())
            self._spot_prices = SpotPrices(cloud.ec2.meta.client, machines, clock)

    def launch(self, node: Node, node_type: NodeType) -> None:
        with self._lock:
            if self._purchases.is_over(node.id):
                return
            if node.id in self._refusals:
                raise self._refusals.pop(node.id)
            if node.id in self._orders:
                return
            cloud_ids = self._running().get(node.id)
            if cloud_ids is None:
                if self._purchases.find(node.id) is not None:
                    return  # bought, and not listed yet, or no more
                self._purchases.check_room()
                try:
                    made = self._create(node)
                except ProviderError:
                    if node.id not in self._running():  # else the cloud sold it, and only its answer was lost
                        raise
                else:
                    if self._config["provider"]["type"] == "gcp":
                        self._orders[node.id] = GoogleOrder(node, made)
                        return
                self._purchases.buy(node, self._clock.now_s())
                cloud_ids = self._running().get(node.id)  # Ray's providers learn a node's tags by listing it
        if cloud_ids is not None:
            self._begin_set_up(cloud_ids[0], node.id, node_type, node.zone)

    def terminate(self, node_id: str) -> None:
        with self._lock:
            self._refusals.pop(node_id, None)
            if self._orders.pop(node_id, None) is not None:
                self._given_up.add(node_id)
            cloud_ids = self._running().get(node_id)
            if cloud_ids is not None:
                self._end(node_id, cloud_ids)
            elif self._is_unlisted(node_id):
                return  # the next tick retries, when the cloud lists it
            if self._purchases.find(node_id) is not None:
                self._purchases.end(node_id, self._clock.now_s(), "terminated")

    def machines(self) -> tuple[Machine, ...]:
        with self._lock:
            running, now_s = self._running(), self._clock.now_s()
            self._settle_orders(now_s)
            running = {node_id: ids for node_id, ids in running.items() if node_id not in self._orders}
            for node_id, cloud_ids in running.items():
                if node_id in self._given_up or self._purchases.is_over(node_id):
                    self._end_stray(node_id, cloud_ids)
                else:
                    kept, spare = self._kept_and_spare(node_id, cloud_ids)
                    self._end_stray(node_id, spare)
                    running[node_id] = [kept]
                    self._adopt(node_id, kept, now_s)
            live = []
            for purchase in self._purchases.open():
                if purchase.node_id in running:
                    purchase = self._at_its_price(purchase, now_s)
                    live.append(purchase.machine(self._address(running[purchase.node_id][0])))
                elif now_s < purchase.started_at_s + _UNLISTED_S:
                    live.append(purchase.machine())
                else:
                    self._purchases.end(purchase.node_id, now_s, "the cloud took it away")
            return in_order([*self._purchases.over(), *live])

    def _settle_orders(self, now_s: float) -> None:
        """Records the ordered machines that Google has made, and those that it could not make."""
        if now_s < self._asked_s + _ORDERS_S:
            return
        self._asked_s = now_s
        for node_id, order in list(self._orders.items()):
            try:
                outcome = self._ask(f"ask for the order of {node_id}", partial(order.outcome, self._cloud))
            except ClusterError as error:  # the next pass asks again
                log.warning("cannot look up an order", extra={"node": node_id, "error": str(error)})
                continue
            if outcome is None:
                continue
            if isinstance(outcome, ProviderError):
                self._refusals[node_id] = outcome
            else:
                self._purchases.buy(order.node, now_s)
            del self._orders[node_id]

    def _at_its_price(self, purchase: PurchaseRecord, now_s: float) -> PurchaseRecord:
        """Records a changed price: AWS bills running spot machines at the present price."""
        prices = self._spot_prices.last() if self._spot_prices is not None else {}
        price = prices.get((purchase.node_type, purchase.zone), purchase.price_micro_usd_h)
        if price == purchase.price_micro_usd_h:
            return purchase
        return self._purchases.reprice(purchase, now_s, price)

    def notices(self) -> tuple[Notice, ...]:
        """Returns the interruption notices of machines that this provider bought. Deletes the stored notices of ended
        machines.
        """
        pinned = [notice for notice in self._board.notices() if self._purchases.find(notice.node_id) is not None]
        for notice in pinned:
            if self._purchases.is_over(notice.node_id):
                self._board.remove(notice.node_id)
        return tuple(notice for notice in pinned if not self._purchases.is_over(notice.node_id))

    def prices(self) -> Mapping[tuple[str, str], int]:
        """Returns the present spot prices on AWS. On other clouds, returns no prices, so that the configured prices
        apply.
        """
        return {} if self._spot_prices is None else self._spot_prices.now()

    def problems(self) -> tuple[str, ...]:
        """Returns one sentence for each running machine whose set-up failed."""
        failed = self._set_up.failures().items()
        return tuple(f"{node_id} could not be set up: {why}" for node_id, why in failed if self._runs(node_id))

    def watch(self, on_change: Callable[[], None]) -> None:
        """Polls the cloud every ten seconds, since Ray's providers send no events."""
        self._watcher = PollWatcher("cloud", _POLL_S, self._look, on_change)

    def close(self) -> None:
        if self._spot_prices is not None:
            self._spot_prices.close()
        if self._watcher is not None:
            self._watcher.close()

    def _look(self) -> set[str]:
        with self._lock:
            return set(self._running())

    def _runs(self, node_id: str) -> bool:
        return self._purchases.find(node_id) is not None and not self._purchases.is_over(node_id)

    def _is_unlisted(self, node_id: str) -> bool:
        purchase = self._purchases.find(node_id)
        return purchase is not None and self._clock.now_s() < purchase.started_at_s + _UNLISTED_S

    def _end(self, node_id: str, cloud_ids: list[str]) -> None:
        for cloud_id in cloud_ids:
            self._ask(f"end {node_id}", partial(self._cloud.terminate_node, cloud_id))

    def _end_stray(self, node_id: str, cloud_ids: list[str]) -> None:
        """Ends machines that nothing can be using: the machine of a node that was recorded as ended because a listing
        had left it out, and second machines of a node.
        """
        try:
            self._end(node_id, cloud_ids)
        except ClusterError as error:  # the next call retries; the other machines are still listed
            log.warning("a machine without a use runs on", extra={"node": node_id, "error": str(error)})

    def _kept_and_spare(self, node_id: str, cloud_ids: list[str]) -> tuple[str, list[str]]:
        """Returns the machine of a node, and the machines that a crash led to be bought for the node, too. The set-up
        of the latter has not begun, so nothing uses them.
        """
        if len(cloud_ids) == 1:
            return cloud_ids[0], []
        new = [cloud_id for cloud_id in cloud_ids if ray_internals.is_new(self._cloud.node_tags(cloud_id))]
        kept = self._begun.get(node_id, "")
        if kept not in cloud_ids:
            kept = next((cloud_id for cloud_id in cloud_ids if cloud_id not in new), cloud_ids[0])
        return kept, [cloud_id for cloud_id in new if cloud_id != kept]

    def _running(self) -> dict[str, list[str]]:
        """Returns the cloud's machine ids by node id; a node has several if a crash led to a second purchase."""
        tags = {ray_internals.NODE_KIND_TAG: "worker"}
        ids = self._ask("list the nodes", lambda: self._cloud.non_terminated_nodes(tags))
        found: dict[str, list[str]] = {}
        for cloud_id in sorted(ids):
            if node_id := self._cloud.node_tags(cloud_id).get(NODE_TAG):
                found.setdefault(node_id, []).append(cloud_id)
        return found

    def _adopt(self, node_id: str, cloud_id: str, now_s: float) -> None:
        """Records a machine whose purchase was not recorded because the controller was killed, and sets the machine up
        if needed.
        """
        tags = self._cloud.node_tags(cloud_id)
        node_type, zone = tags.get(ray_internals.NODE_TYPE_TAG, ""), tags.get(_ZONE_TAG, "")
        if self._purchases.find(node_id) is None:
            self._purchases.record(PurchaseRecord(node_id, node_type, zone, int(tags.get(_PRICE_TAG, 0)), now_s))
        if not ray_internals.is_set_up(tags) and node_type in self._types:
            self._begin_set_up(cloud_id, node_id, self._types[node_type], zone)

    def _begin_set_up(self, cloud_id: str, node_id: str, node_type: NodeType, zone: str) -> None:
        self._begun.setdefault(node_id, cloud_id)
        self._set_up.begin(cloud_id, node_id, node_type, zone)

    def _create(self, node: Node) -> Any:
        """Buys the machine, and returns the cloud's answer. Only a failure of this call raises ProviderError, since
        other failures say nothing about the pool.
        """
        raw = self._config["available_node_types"][node.type]
        tags = ray_internals.worker_tags(self._config, node.type)
        tags |= {NODE_TAG: node.id, _ZONE_TAG: node.zone, _PRICE_TAG: str(node.price_micro_usd_h)}
        node_config = self._in_zone(dict(raw.get("node_config", {})), node.zone)
        return self._ask(
            f"buy {node.type} in {node.zone}",
            lambda: self._cloud.create_node_with_resources_and_labels(
                node_config, tags, 1, raw.get("resources", {}), raw.get("labels", {})
            ),
            ProviderError,
        )

    def _in_zone(self, node_config: dict[str, Any], zone: str) -> dict[str, Any]:
        """Restricts Ray's AWS provider, which would choose a zone itself, to one zone."""
        if self._config["provider"]["type"] == "aws":
            wanted = node_config.get("SubnetIds", [])
            subnets = self._ask(
                "look at the subnets", lambda: self._cloud.ec2.meta.client.describe_subnets(SubnetIds=wanted)["Subnets"]
            )
            matching = [subnet["SubnetId"] for subnet in subnets if subnet["AvailabilityZone"] == zone]
            if not matching:
                raise ConfigError(
                    f"no subnet of this cluster lies in {zone}.",
                    hint=f"Add {zone} to provider.availability_zone, or take it out of the node type's zones.",
                )
            return node_config | {"SubnetIds": matching}
        return node_config

    def _address(self, cloud_id: str) -> str:
        return str(self._ask("ask for an address", lambda: self._cloud.internal_ip(cloud_id)) or "")

    def _ask(self, what: str, call: Callable[[], Any], kind: type[RaytideError] = ClusterError) -> Any:
        try:
            return call()
        except Exception as error:  # each cloud's library has its own errors
            raise kind(f"{self._config['provider']['type']} could not {what}: {error}") from error
