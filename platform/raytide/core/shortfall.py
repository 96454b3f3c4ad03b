"""Why something cannot be placed, in words: the first constraint that is unmet and the nearest thing that would meet it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Shortfall:
    """`impossible`: no fleet of these node types could; `capacity`: others hold it; `stock`: its pools back off."""

    constraint: Literal["impossible", "capacity", "stock"]
    reason: str
    remedy: str
    retry_at_s: float | None = None
