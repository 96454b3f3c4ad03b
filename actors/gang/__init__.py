"""Gangs on Ray. Each member of a lease has one detached placement group. The classes here let user code use the gang of
its job.
"""

from __future__ import annotations

from raytide.actors.gang.gang import Gang

__all__ = ["Gang"]
