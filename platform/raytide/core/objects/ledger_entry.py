"""A line of the ledger, and what it is made from: who held which share of a node since when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

CostBy = Literal["kind", "job", "endpoint", "team", "node"]
"""What sums of entries can be grouped by."""


class EntryKind(StrEnum):
    JOB = "job"  # seats of a job's gang
    ENDPOINT = "endpoint"  # replicas
    UNMANAGED = "unmanaged"  # used in Ray by nobody that raytide knows
    IDLE = "idle"  # ready, and free for anybody
    STARTUP = "startup"  # paid, and not ready yet
    WASTE = "waste"  # paid for nothing: a job's work that was lost, or a node that drains and nobody may use


@dataclass(frozen=True, slots=True)
class Share:
    """One holder's part of a node. `weight` is its share of the node's dominant resource, 1.0 for the whole node."""

    kind: EntryKind
    subject: str
    """A job's id, an endpoint's name, or "" when it is nobody's."""
    team: str
    weight: float


Occupancy = tuple[Share, ...]
"""Every share of one node, what is left over included; sorted, so that equal occupancies compare equal."""


@dataclass(frozen=True, slots=True)
class OpenInterval:
    """What a node has cost since `from_us` and is not booked yet: one for each node that the provider bills."""

    node_id: str
    price_micro_usd_h: int
    origin_us: int
    """When the provider began to bill: amounts are differences of costs cumulated from here."""
    from_us: int
    occupancy: Occupancy


@dataclass(frozen=True, slots=True)
class Entry:
    """The cost of a share of a node over [from_us, to_us). Never changed; a mistake is reversed by a second entry."""

    node_id: str
    from_us: int
    to_us: int
    kind: EntryKind
    subject: str
    team: str
    price_micro_usd_h: int
    """Of the whole node, at the time."""
    amount_micro_usd: int
    """Of this share; negative in a reversal."""
    is_reversal: bool = False
    """It takes back what was booked beyond the node's end, which became known only afterwards."""
    cause: str = ""
    """Of the two entries that move lost work from its job to waste: the job that it gave way to, or the node that went.
    Both have the whole span of the entry that bears the loss; the amount is the lost part."""


DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """A sum of entries that have all of this in common; `node_id` and `day` (since the epoch) only where asked for."""

    kind: EntryKind
    subject: str
    team: str
    node_id: str
    day: int
    amount_micro_usd: int
    cause: str = ""
    """Of lost work, where it is asked for by itself."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Micro-dollars that are booked. What is still open is at most a minute old; budgets leave more time than that."""

    jobs: Mapping[str, int] = field(default_factory=dict)
    """In all."""
    jobs_month: Mapping[str, int] = field(default_factory=dict)
    """In one month."""
    teams_month: Mapping[str, int] = field(default_factory=dict)
