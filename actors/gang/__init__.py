"""Gangs on Ray. Each member of a lease has one detached placement group. The classes here give user code access to its
lease.
"""

from __future__ import annotations

from raytide.actors.gang.gang import Gang

__all__ = ["Gang"]
