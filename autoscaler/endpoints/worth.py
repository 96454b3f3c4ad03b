"""How many nodes are worth their price: each by the late requests that it spares.

A node is bought when it spares more than it costs. It is let go when what it has cost beyond its worth would have paid
for a new start, which is never more than twice the best that could have been done (ski rental).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from raytide.autoscaler.endpoints.queue_simulator import Floats

LEAST_SPARE = 0.25
"""Replicas: a fleet without any to spare is taken to work off what waits at this pace."""


@dataclass(slots=True)
class HysteresisCount:
    """How many nodes at one price."""

    count: int = 0
    _regret_usd: Floats = field(default_factory=lambda: np.zeros(0))
    """By node: what it has cost beyond its worth since it was last worth it."""

    def update(self, worth_usd_h: Floats, usd_h: float, start_usd: float, dt_s: float) -> None:
        """`worth_usd_h`: of the first node, the second..."""
        if len(self._regret_usd) != len(worth_usd_h):
            self._regret_usd = np.zeros(len(worth_usd_h))
        node = np.arange(1, len(worth_usd_h) + 1)
        held = node <= self.count
        lost_usd = (usd_h - worth_usd_h) * dt_s / 3600.0
        self._regret_usd = np.where(held & (lost_usd > 0), self._regret_usd + lost_usd, 0.0)
        stays = np.where(held, self._regret_usd < start_usd, worth_usd_h > usd_h)
        self.count = int(node[stays].max(initial=0))


def late_with_losses(late_per_h: Floats, shares: Floats, missing: Floats) -> Floats:
    """`late_per_h` of 0, 1, 2... nodes when for a `share` [loss] of the time some are `missing` [loss, nodes]."""
    nodes = np.arange(len(late_per_h))
    without = np.interp(nodes - missing, nodes, late_per_h)
    total: Floats = late_per_h + shares @ (without - late_per_h)
    return total


def spared_by_draining(
    late_usd: float, rate_rps: float, work: float, backlog_s: float, cold_start_s: float, most: int
) -> Floats:
    """What the first node, the second... is worth an hour while `backlog_s` replica-seconds wait beside the usual
    `work` (replicas): all that arrives until then is late, and who is faster is needed for a shorter time."""
    spare = np.maximum(np.arange(most + 1) - work, LEAST_SPARE)
    drain_s = backlog_s / spare
    worth: Floats = late_usd * rate_rps * -np.diff(drain_s) * 3600.0 / (cold_start_s + drain_s[1:])
    return worth
