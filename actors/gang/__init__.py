"""Gangs on Ray: one detached placement group per member of a lease, and the classes that show user code its lease."""

from __future__ import annotations

from raytide.actors.gang.gang import Gang

__all__ = ["Gang"]
