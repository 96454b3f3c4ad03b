"""The entries of the ledger, and the node occupancies from which the entries are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

CostBy = Literal["kind", "job", "endpoint", "team", "node"]
"""The keys by which sums of entries can be grouped."""


class EntryKind(StrEnum):
    JOB = "job"  # members of a job's gang
    ENDPOINT = "endpoint"  # replicas
    UNMANAGED = "unmanaged"  # used in Ray without a lease
    IDLE = "idle"  # ready, and free for anybody
    STARTUP = "startup"  # paid, and not ready yet
    WASTE = "waste"  # a job's work that was lost, or the unused part of a node that drains


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a node that one job or endpoint holds. `weight` is the largest share that the job or endpoint holds
    of any one resource of the node. 1.0 is the whole node.
    """

    kind: EntryKind
    subject: str
    """A job's id, an endpoint's name, or "" for none."""
    team: str
    weight: float


Occupancy = tuple[Share, ...]
"""All shares of one node, the unused one included; sorted, so that equal occupancies compare equal."""


@dataclass(frozen=True, slots=True)
class OpenInterval:
    """The time since `from_us` for which a node's cost is not booked yet. Each node that the provider bills has one
    open interval."""

    node_id: str
    price_micro_usd_h: int
    origin_us: int
    """The time at which the provider's bill starts. Amounts are differences of the costs cumulated since then."""
    from_us: int
    occupancy: Occupancy


@dataclass(frozen=True, slots=True)
class Entry:
    """The cost of a share of a node over [from_us, to_us). Entries never change. A mistake is corrected by a second
    entry that reverses it."""

    node_id: str
    from_us: int
    to_us: int
    kind: EntryKind
    subject: str
    team: str
    price_micro_usd_h: int
    """The price of the whole node at that time, in micro-dollars an hour."""
    amount_micro_usd: int
    """The cost of this share; negative in a reversal."""
    is_reversal: bool = False
    """True for an entry that cancels costs beyond the node's end, which became known only later."""
    cause: str = ""
    """The preemptor or the lost node, in the two entries that move lost work from its job to waste.

    Both span the whole entry that bears the loss; their amount is the lost part.
    """
    energy_mj: int = 0
    """The share's part of the node's energy, as measured or estimated, in millijoules. It is never moved or reversed:
    the energy was used."""


DAY_US = 86_400_000_000


@dataclass(frozen=True, slots=True)
class Line:
    """The sum of all ledger entries that agree in these fields. `node_id` and `day` (days since the epoch) are set only
    if the sums are grouped by them."""

    kind: EntryKind
    subject: str
    team: str
    node_id: str
    day: int
    amount_micro_usd: int
    cause: str = ""
    """The cause of lost work; empty unless the sum is grouped by cause."""
    energy_mj: int = 0


@dataclass(frozen=True, slots=True)
class Spent:
    """The booked spending in micro-dollars. It leaves out open intervals, which are at most a minute old. Budgets have
    a margin for them."""

    jobs: Mapping[str, int] = field(default_factory=dict)
    """Micro-dollars in total, by job."""
    jobs_month: Mapping[str, int] = field(default_factory=dict)
    """Micro-dollars in one month, by job."""
    teams_month: Mapping[str, int] = field(default_factory=dict)
