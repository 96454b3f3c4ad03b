"""The dataclasses for groups of records. The store reads or writes each group in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.core.objects.ledger_entry import Entry, OpenInterval
from raytide.core.objects.node import Node, Signal
from raytide.core.objects.plan import Plan
from raytide.core.objects.snapshot import Pool
from raytide.core.specs.order import Order
from raytide.core.specs.rollout import Rollout, Serving


@dataclass(frozen=True, slots=True)
class Records:
    """All records that are not final, read in one transaction. A restarted controller continues from them."""

    jobs: tuple[Job, ...] = ()
    """Jobs that are not final, in order of submission."""
    leases: tuple[Lease, ...] = ()
    """Leases that are not released, in order of admission."""
    nodes: tuple[Node, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    pools: tuple[Pool, ...] = ()
    intervals: Mapping[str, OpenInterval] = field(default_factory=dict)
    """Open intervals by node id, including gone nodes whose last interval is not booked yet."""
    teams: tuple[StoredTeam, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    """Rollouts that have not ended."""
    serving: Mapping[str, Serving] = field(default_factory=dict)
    """The application and revision that serve an endpoint, by the endpoint's name. An endpoint without an entry is
    served by its first application.
    """
    orders: tuple[Order, ...] = ()
    """Interventions that are not carried out yet, oldest first."""
    signals: Mapping[tuple[str, str], Signal] = field(default_factory=dict)
    """The last value that users reported, by endpoint and signal."""
    next_node: int = 1
    next_lease: int = 1


@dataclass(frozen=True, slots=True)
class StoredTeam:
    """The stored data of a team, which supplements the team's configuration."""

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """The TeamSpec fields that were set while the cluster ran; for amounts, only the resources that were set."""
    recent_gpu_s: float = 0.0
    """The recent usage in GPU-seconds, as it was at `recent_at_s`."""
    recent_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """A state transition of a job, lease, node or endpoint."""

    at_s: float
    subject: str
    from_state: str
    """The state before; empty for a new subject."""
    to_state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one tick, written in one transaction.

    State changes of jobs, leases, nodes and endpoints become events automatically. `events` lists the events that
    are written in addition.
    """

    at_s: float
    jobs: tuple[Job, ...] = ()
    leases: tuple[Lease, ...] = ()
    nodes: tuple[Node, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    pools: tuple[Pool, ...] = ()
    entries: tuple[Entry, ...] = ()
    intervals: tuple[OpenInterval, ...] = ()
    """The open intervals that replace the nodes' former ones."""
    closed: tuple[str, ...] = ()
    """The ids of nodes whose last interval is booked."""
    teams: tuple[StoredTeam, ...] = ()
    """The teams whose recent usage is written; their other fields are not."""
    plan: Plan | None = None
    rollouts: tuple[Rollout, ...] = ()
    orders: tuple[Order, ...] = ()
    """The interventions that are done."""
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A stored plan. If the next tick makes the same plan, only `last_at_s` is updated."""

    at_s: float
    last_at_s: float
    actions: tuple[Mapping[str, object], ...]
