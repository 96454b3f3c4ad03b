"""Corrects a greedy plan of purchases: drops new nodes whose members fit elsewhere, and replaces new nodes by cheaper
ones.

The greedy plan places shapes one after another, each in the way that is best for it alone. Nothing has been bought
yet, so a correction costs nothing. Members that were spread over zones stay in their zones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raytide.core.objects.node import Resources, plus, round_up_gpu_share
from raytide.scheduling.offerings import Offering
from raytide.scheduling.placement import Slot, Tenant
from raytide.scheduling.state import SchedulingState

FULL = 0.999
MOST_TENANTS = 64
"""The number of tenants above which a node is not emptied, because it is nearly full and slow to try."""


@dataclass(slots=True)
class Repacking:
    moved: dict[str, list[Slot]] = field(default_factory=dict)
    """The new slots of the tenants of each dropped node, in their order, by node id."""
    swapped: dict[str, Slot] = field(default_factory=dict)
    """The new slot of each node that is bought as another type, by node id."""

    def final_slot(self, slot: Slot) -> Slot:
        """Returns the slot of a member after repacking. Call it for the members of a node in the order of their
        placement.
        """
        if elsewhere := self.moved.get(slot.node_id):
            slot = elsewhere.pop(0)
        return self.swapped.get(slot.node_id, slot)


def repack(room: SchedulingState) -> Repacking:
    """Drops or replaces new nodes where that lowers the cost, starting with the most expensive node. Changes `room`
    accordingly.
    """
    repacking = Repacking()
    receivers: set[str] = set()
    for node_id, offering in sorted(room.bought.items(), key=lambda item: -item[1].cost_micro_usd_h):
        tenants = room.tenants[node_id]
        row = room.rows[node_id]
        if (
            not tenants
            or len(tenants) > MOST_TENANTS
            or room.node_table.share_taken(row, offering.node_type.resources) > FULL
        ):
            continue
        is_free = node_id not in receivers and not any(tenant.is_apart for tenant in tenants)
        if is_free and (slots := _slots_elsewhere(room, row, tenants)):
            repacking.moved[node_id] = slots
            receivers.update(slot.node_id for slot in slots)
            _remove(room, node_id)
        elif cheaper := _cheaper_offering(room, offering, tenants):
            repacking.swapped[node_id] = _swap(room, node_id, cheaper, tenants)
    room.full.clear()
    return repacking


def _slots_elsewhere(room: SchedulingState, row: int, tenants: list[Tenant]) -> list[Slot]:
    """Reserves slots on other nodes for all tenants of this row; returns none if they do not all fit."""
    restore = room.node_table.checkpoint()
    slots: list[Slot] = []
    for tenant in tenants:
        rows, _ = room.node_table.fitting(tenant.shape.resources, tenant.labels, enough=1, but=row)
        if not rows.size:
            restore()
            return []
        room.node_table.reserve(int(rows[0]), tenant.shape.resources)
        slots.append(room.slots[int(rows[0])])
    for slot, tenant in zip(slots, tenants, strict=True):
        if slot.is_new:
            room.tenants[slot.node_id].append(tenant)
    return slots


def _cheaper_offering(room: SchedulingState, offering: Offering, tenants: list[Tenant]) -> Offering | None:
    """Returns the cheapest offering that holds all of these tenants and costs less than `offering`; None if there is
    none.
    """
    offerings, table = room.offerings, room.offerings.table
    cost = table.cost + table.data_cost(tenant.shape for tenant in tenants)
    able = (cost < cost[offering.row]) & table.could_hold(_total(tenants)) & (offerings.purchasable() > 0)
    for labels, types in {(tuple(tenant.labels.items()), tenant.allowed_types) for tenant in tenants}:
        able &= table.matching(dict(labels)) & table.allowed(types)
    rows = np.flatnonzero(able)
    return table.offerings[rows[cost[rows].argmin()]] if len(rows) else None


def _swap(room: SchedulingState, node_id: str, offering: Offering, tenants: list[Tenant]) -> Slot:
    row = room.rows[node_id]
    room.offerings.cancel(room.bought[node_id])
    room.offerings.buy(offering)
    room.bought[node_id] = offering
    room.node_table.set_free(row, _without(offering.node_type.resources, _total(tenants)), offering.labels)
    room.slots[row] = room.slots[row]._replace(node_type=offering.node_type.name, zone=offering.zone)
    return room.slots[row]


def _remove(room: SchedulingState, node_id: str) -> None:
    """Removes a node that will not be bought."""
    room.offerings.cancel(room.bought.pop(node_id))
    del room.tenants[node_id]
    room.node_table.set_free(room.rows.pop(node_id), {}, {})


def _total(tenants: list[Tenant]) -> Resources:
    total: Resources = {}
    for tenant in tenants:
        total = plus(total, round_up_gpu_share(tenant.shape.resources))
    return total


def _without(total: Resources, taken: Resources) -> Mapping[str, float]:
    return {name: amount - taken.get(name, 0.0) for name, amount in total.items()}
