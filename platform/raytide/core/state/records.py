"""What goes into the store and comes out of it in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.core.objects.ledger_entry import Entry, OpenInterval
from raytide.core.objects.node import Node
from raytide.core.objects.plan import Plan
from raytide.core.objects.snapshot import Pool


@dataclass(frozen=True, slots=True)
class Records:
    """All that is not final, read in one transaction: what a controller that was killed goes on from."""

    jobs: tuple[Job, ...] = ()
    """In order of submission."""
    leases: tuple[Lease, ...] = ()
    """In order of admission."""
    nodes: tuple[Node, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    pools: tuple[Pool, ...] = ()
    intervals: Mapping[str, OpenInterval] = field(default_factory=dict)
    """By node id; also of a node that is gone and whose last interval is not booked yet."""
    teams: tuple[StoredTeam, ...] = ()
    next_node: int = 1
    next_lease: int = 1


@dataclass(frozen=True, slots=True)
class StoredTeam:
    """What is kept of a team beside its configuration."""

    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    """The fields of TeamSpec that somebody set while the cluster ran, and of amounts those that he set."""
    recent_gpu_s: float = 0.0
    """As it was at `recent_at_s`."""
    recent_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """A subject (job, lease, node, endpoint) went from one state to another."""

    at_s: float
    subject: str
    from_state: str
    """"" when it is new."""
    to_state: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Changes:
    """What one pass of the controller writes, all of it or nothing.

    Transitions of jobs, leases, nodes and endpoints become events by themselves; `events` is for others.
    """

    at_s: float
    jobs: tuple[Job, ...] = ()
    leases: tuple[Lease, ...] = ()
    nodes: tuple[Node, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    pools: tuple[Pool, ...] = ()
    entries: tuple[Entry, ...] = ()
    intervals: tuple[OpenInterval, ...] = ()
    """Open from now on, in place of the node's former one."""
    closed: tuple[str, ...] = ()
    teams: tuple[StoredTeam, ...] = ()
    """Their recent use alone is written."""
    """Nodes whose last interval is booked."""
    plan: Plan | None = None
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan as it was stored; passes that decided the same again only move `last_at_s`."""

    at_s: float
    last_at_s: float
    actions: tuple[Mapping[str, object], ...]
