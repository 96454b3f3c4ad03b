"""The orders in the store. An order is an operator's intervention, such as the restart of a replica. The API adds
orders, and the controller carries them out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from raytide.core.errors import ConflictError, NotFoundError, QuotaError
from raytide.core.specs.order import HOLD, Order, OrderSpec
from raytide.core.state import codec
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.tables import orders
from raytide.core.state.tenancy.audit import record
from raytide.core.state.write import update

MOST_OPEN = 1000
_KEPT_S = 30 * 86_400.0
_FIELDS = codec.shared(Order, orders)


class OrderRecords(DatabaseAccess):
    def add(self, spec: OrderSpec, user: str, now_s: float) -> Order:
        """Adds an order. If an order with this id exists, returns the existing order.

        Raises ConflictError if the existing order requests something else. Raises QuotaError if too many orders are not
        carried out yet.
        """
        with self._db.write() as c:
            known = c.execute(orders.select().where(orders.c.id == spec.id)).first()
            if known is not None:
                if (known.kind, known.subject, known.replica) != (spec.kind, spec.subject, spec.replica):
                    raise ConflictError(f"the id {spec.id} was used for another order.", hint="Use a new id.")
                return _order(known)
            is_open = orders.c.done_at_s.is_(None)
            if (c.execute(sa.select(sa.func.count()).where(is_open)).scalar() or 0) >= MOST_OPEN:
                raise QuotaError(f"{MOST_OPEN} orders are not carried out yet.", hint="Does the controller run?")
            c.execute(orders.delete().where(orders.c.done_at_s < now_s - _KEPT_S))
            made = Order(**spec.model_dump(), user=user, at_s=now_s)
            c.execute(orders.insert(), codec.values_of(made, _FIELDS))
            detail = {"order": spec.id, "replica": spec.replica, "reason": spec.reason}
            record(c, f"order.{spec.kind}", spec.subject, {name: value for name, value in detail.items() if value})
            return made

    def hold(self) -> Order | None:
        """Returns the order that stops the controller from acting. Returns None if the controller may act."""
        with self._db.read() as c:
            return next((order for order in open_orders(c) if order.kind == HOLD), None)

    def note(self, action: str, object: str, detail: Mapping[str, Any]) -> None:
        """Adds an entry to the audit log, with the caller as its actor."""
        with self._db.write() as c:
            record(c, action, object, detail)

    def get(self, id: str) -> Order:
        row = self._db.first(orders.select().where(orders.c.id == id))
        if row is None:
            raise NotFoundError(f"there is no order {id}.", hint="Orders are kept for 30 days.")
        return _order(row)


def open_orders(c: sa.Connection) -> tuple[Order, ...]:
    """Returns the orders that are not carried out yet, oldest first."""
    query = orders.select().where(orders.c.done_at_s.is_(None)).order_by(orders.c.number)
    return tuple(_order(row) for row in c.execute(query))


def end_orders(c: sa.Connection, done: Iterable[Order]) -> None:
    for order in done:
        update(c, orders, {"id": order.id}, {"done_at_s": order.done_at_s, "outcome": order.outcome})


def _order(row: sa.Row[tuple[object, ...]]) -> Order:
    return Order(**codec.fields_of(row, _FIELDS))
