"""The state store: the records that survive the death of any process. Only the controller and the API open it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytide.core.state.records import Changes, Event, Records, StoredPlan

if TYPE_CHECKING:
    from raytide.core.state.store import Store as Store

__all__ = ["Changes", "Event", "Records", "Store", "StoredPlan"]


def __getattr__(name: str) -> object:
    """Loads `Store` on first use, because it imports SQLAlchemy."""
    if name == "Store":
        from raytide.core.state.store import Store

        return Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
