"""What was measured and when: an old word, or none, never takes anything away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FRESH_S = 10.0
"""Older words of nodes, replicas and routers are not believed when they would take something away."""

Meter = Literal["cpu", "gpu"]


@dataclass(frozen=True, slots=True)
class Signal:
    value: float
    at_s: float
    """When it was measured, not when it was read."""

    def is_fresh(self, now_s: float) -> bool:
        return now_s - self.at_s <= FRESH_S


Use = Mapping[Meter, Signal]
"""Physical use of one node, 0 to 1: of its CPUs together, of the busiest of its GPUs."""
