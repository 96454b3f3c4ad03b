"""Purchase records of a cloud's machines, in files. The bill includes ended machines, which a cloud no longer lists.

- `<folder>/<node-id>.json` is written as soon as the cloud has the machine. If a crash prevents that,
  the machine is found by its tags.
- `<node-id>.seen.json` is written when the cloud has listed the machine for the first time. Only some
  providers need this file.
- `<node-id>.end.json` is written when the machine is ended, or by the first call in which the cloud no
  longer lists the machine. It is never written a second time.
- `<node-id>.prices.json` is written whenever the price of the running machine changes.

No record is ever deleted. Therefore the folder is listed again only after a change, and the records of an ended
machine are read once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raytide.autoscaler.providers.base import Machine
from raytide.core.io.atomic_file import check_room, create_json, read_json, sweep, write_json
from raytide.core.io.storage import full_disk_is_an_error
from raytide.core.objects.node import Node

_SETTLED_S = 2.0
"""The age of a folder's modification time from which a further change gives another time: file systems round it."""


@dataclass(frozen=True, slots=True)
class PurchaseRecord:
    """The record of one purchased machine."""

    node_id: str
    node_type: str
    zone: str
    price_micro_usd_h: int
    """The present price."""
    started_at_s: float
    earlier: tuple[tuple[float, int], ...] = ()
    """Earlier prices as (valid until, micro-dollars an hour), oldest first."""

    def machine(self, address: str = "", *, ray_id: str = "") -> Machine:
        return Machine(
            self.node_id,
            self.node_type,
            self.zone,
            self.price_micro_usd_h,
            self.started_at_s,
            earlier=self.earlier,
            address=address,
            ray_id=ray_id,
        )


def in_order(machines: Iterable[Machine]) -> tuple[Machine, ...]:
    return tuple(sorted(machines, key=lambda machine: (machine.started_at_s, machine.node_id)))


@dataclass(frozen=True, slots=True)
class _Listing:
    """The ids of the nodes in the folder, as of its modification time `changed_ns`."""

    changed_ns: int
    open: tuple[str, ...]
    over: frozenset[str]


class Purchases:
    """The purchase records of one cluster, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over: dict[str, Machine] = {}
        self._listed: _Listing | None = None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep([folder])

    def check_room(self) -> None:
        """Raises StorageError if the disk is too full to record a purchase. The caller must then buy nothing."""
        with full_disk_is_an_error(str(self._folder)):
            check_room(self._folder)

    def record(self, purchase: PurchaseRecord) -> None:
        """Writes the purchase record, unless the node has one already."""
        self._listed = None
        bought = {name: value for name, value in asdict(purchase).items() if name != "earlier"}
        create_json(self._folder / f"{purchase.node_id}.json", bought)

    def buy(self, node: Node, now_s: float) -> None:
        """Records that the node was bought now, unless the node has a record already."""
        self.record(PurchaseRecord(node.id, node.type, node.zone, node.price_micro_usd_h, now_s))

    def reprice(self, purchase: PurchaseRecord, now_s: float, price_micro_usd_h: int) -> PurchaseRecord:
        """Records a new price of the machine, and returns the changed record. The price is valid from `now_s` on."""
        earlier = (*purchase.earlier, (now_s, purchase.price_micro_usd_h))
        prices_record = {"price_micro_usd_h": price_micro_usd_h, "earlier": earlier}
        write_json(self._folder / f"{purchase.node_id}.prices.json", prices_record)
        return replace(purchase, price_micro_usd_h=price_micro_usd_h, earlier=earlier)

    def find(self, node_id: str) -> PurchaseRecord | None:
        record = read_json(self._folder / f"{node_id}.json")
        if record is None:
            return None
        prices = read_json(self._folder / f"{node_id}.prices.json") or {}
        earlier = tuple((until_s, price) for until_s, price in prices.get("earlier", ()))
        return PurchaseRecord(**{**record, **prices, "earlier": earlier})

    def see(self, node_id: str) -> None:
        """Records that the cloud has listed the machine. From then on, a machine that the cloud no longer lists counts
        as ended.
        """
        create_json(self._folder / f"{node_id}.seen.json", {"seen": True})

    def was_seen(self, node_id: str) -> bool:
        return (self._folder / f"{node_id}.seen.json").exists()

    def end(self, node_id: str, now_s: float, reason: str) -> None:
        """Records the end of the machine. An end that was recorded earlier is kept."""
        self._listed = None
        create_json(self._folder / f"{node_id}.end.json", {"ended_at_s": now_s, "reason": reason})

    def is_over(self, node_id: str) -> bool:
        return (self._folder / f"{node_id}.end.json").exists()

    def open(self) -> list[PurchaseRecord]:
        """Returns the purchase records of machines without a recorded end."""
        found = (self.find(node_id) for node_id in self._ids().open)
        return [purchase for purchase in found if purchase is not None]

    def machines(self) -> tuple[Machine, ...]:
        """Returns all recorded machines. A machine without a recorded end may be gone. Only the controller's provider
        checks whether such a machine still runs.
        """
        live, over = self.open(), self.over()  # in this order: one that ends meanwhile is in both
        ended = {machine.node_id for machine in over}
        return in_order([*over, *(purchase.machine() for purchase in live if purchase.node_id not in ended)])

    def over(self) -> list[Machine]:
        """Returns the ended machines with their billed times. A machine's end is never before its start, even if the
        clock was set back.
        """
        for node_id in sorted(self._ids().over - self._over.keys()):
            purchase, end = self.find(node_id), read_json(self._folder / f"{node_id}.end.json")
            if purchase is not None and end is not None:
                ended = purchase.machine()
                ended_at_s = max(end["ended_at_s"], ended.started_at_s)
                self._over[node_id] = replace(ended, ended_at_s=ended_at_s, reason=end["reason"])
        return list(self._over.values())

    def _ids(self) -> _Listing:
        now_s, changed_ns = time.time(), self._folder.stat().st_mtime_ns
        if self._listed is not None and self._listed.changed_ns == changed_ns:
            return self._listed
        names = [name.removesuffix(".json") for name in os.listdir(self._folder) if name.endswith(".json")]
        over = frozenset(name.removesuffix(".end") for name in names if name.endswith(".end"))
        bought = (name for name in names if not name.endswith((".end", ".seen", ".prices")))
        listed = _Listing(changed_ns, tuple(sorted(name for name in bought if name not in over)), over)
        self._listed = listed if now_s - changed_ns / 1e9 > _SETTLED_S else None
        return listed
