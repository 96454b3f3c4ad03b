"""The values that users report for endpoints to scale on. The API writes them, the controller reads them."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from raytide.core.objects.node import Signal
from raytide.core.state.database import Database
from raytide.core.state.registry import tables as t
from raytide.core.state.write import upsert

_KEPT_S = 86_400.0


class SignalRecords:
    def __init__(self, database: Database) -> None:
        self._db = database

    def save(self, endpoint: str, values: Mapping[str, float], now_s: float) -> None:
        """Keeps the values in place of earlier ones."""
        rows = [{"name": endpoint, "signal": name, "value": value, "at_s": now_s} for name, value in values.items()]
        with self._db.write() as c:
            c.execute(t.signals.delete().where(t.signals.c.at_s < now_s - _KEPT_S))
            upsert(c, t.signals, rows)


def reported(c: sa.Connection) -> dict[tuple[str, str], Signal]:
    """Returns the last values by endpoint and signal."""
    return {(row.name, row.signal): Signal(row.value, row.at_s) for row in c.execute(t.signals.select())}
