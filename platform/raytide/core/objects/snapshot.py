"""All that a decision may look at: clock, prices, records and observations, frozen at one instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.core.objects.endpoint import Endpoint, EndpointLoad, ReplicaValue
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.core.objects.node import CapacityType, Node, NodeType, Resources, Use
from raytide.core.objects.team import CLASSES, Team

Throughputs = Mapping[str, float]
"""What is done on each node type, in units of where it is least; empty when all do alike, or nobody knows better."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's record with what Ray says of it now."""

    node: Node
    total: Resources
    """As Ray reports it; its type's resources until it joined."""
    available: Resources
    """Not taken in Ray: placement groups, actors and tasks are already deducted. `total` until it joined."""
    labels: Mapping[str, str]
    idle_s: float = 0.0
    """How long nothing has run on it, by our own clock; 0 when busy or not ready."""
    is_draining: bool = False
    """Ray itself says that it gives the node no new work; until then a notice is told again."""
    use: Use = field(default_factory=dict)
    """What its meters said last, however long ago."""
    busy: str = ""
    """Why it must not be called idle though Ray does; empty when nothing speaks against it."""

    @property
    def countable(self) -> Resources:
        """`total` without the object store: Ray takes off it what objects happen to fill, whoever made them."""
        return {name: amount for name, amount in self.total.items() if name != "object_store_memory"}


@dataclass(frozen=True, slots=True)
class EndpointView:
    endpoint: Endpoint
    load: EndpointLoad | None
    """None when nothing was heard yet."""
    worth: ReplicaValue | None = None
    """What replicas of an endpoint with an SLO are worth; None where that is not known."""
    pools: tuple[tuple[str, str], ...] | None = None
    """By a decision: node type and zone in which each new replica is to be bought; None: where it is cheapest."""
    given_up: tuple[str, ...] = ()
    """By the same decision: nodes that its replicas leave."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Work without a lease that Ray cannot place: `count` times `resources` on nodes that match `labels`."""

    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    count: int = 1
    together: str = ""
    """A label of nodes: all of it sits where that has one value, or nowhere."""
    apart: str = ""
    """Of a placement group whose bundles must all be on different nodes: the label that nodes with one of them have."""
    is_standing: bool = False
    """Not work: room that somebody asked Ray to have, used or not, until he asks for another."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The launch history of one node type in one zone."""

    node_type: str
    zone: str
    failures: int = 0
    """In a row; 0 after a success."""
    retry_at_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Quote:
    """What an hour of a pool's nodes costs now, and how often it takes one back."""

    node_type: str
    zone: str
    price_micro_usd_h: int | None = None
    """None: as the node type says."""
    deaths_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class MarketConstraint:
    markets: tuple[CapacityType, ...] | None
    """Where its gang may sit, the wanted one first; none while it waits for spot. None when it is late: then it sits
    where any other job would."""
    is_urgent: bool
    """It has no time for another attempt on spot: it goes first in its class, and nobody preempts it."""
    due_at_s: float
    work_s: float | None
    """What is left, with a margin; None when nobody knows."""
    latest_s: float | None
    """When it must have asked for on-demand nodes, unless it works on others."""
    reason: str

    @property
    def wanted(self) -> CapacityType | None:
        """Where it should sit; None while that is nowhere, or anywhere."""
        return self.markets[0] if self.markets else None


@dataclass(frozen=True, slots=True)
class SpotForecast:
    """Some spot pools, watched as one market; `raytide.autoscaler.spot.availability_model` says what the rates mean."""

    pools: tuple[str, ...]
    is_up: tuple[bool, ...]
    """Whether each could be had, as far as was heard."""
    since_s: tuple[float, ...]
    lost: tuple[float, ...]
    switched: tuple[tuple[float, ...], ...]
    found: tuple[float, ...]
    zone_hazard: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the fleet may cost an hour, and how fast it may change. None: as much as it likes."""

    soft_micro_usd_h: int | None = None
    """Above it only spot is bought."""
    hard_micro_usd_h: int | None = None
    """Above it nothing is bought."""
    launches_per_min: int | None = None
    """A gang is never cut in half by it."""
    moves_after_s: float | None = 600.0
    """No node whose occupants could be held for less is left when it is younger; None: none ever is."""
    shrink_for_serving: bool = True
    """Replicas that find no room take seats that elastic gangs of a lower class can spare."""
    most_micro_usd_h: int | None = None
    """When the fleet costs clearly more, nodes go until it costs this, the least valuable first."""


@dataclass(frozen=True, slots=True)
class Unmanaged:
    """How much demand without a lease may buy."""

    max_nodes: int = 1
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    at_s: float
    node_types: tuple[NodeType, ...]
    nodes: tuple[NodeView, ...] = ()
    """Every node that is not GONE."""
    jobs: tuple[Job, ...] = ()
    """Every job that is not final, in order of submission."""
    leases: tuple[Lease, ...] = ()
    """Every lease that is not RELEASED, in order of admission."""
    endpoints: tuple[EndpointView, ...] = ()
    demand: tuple[Demand, ...] = ()
    pools: tuple[Pool, ...] = ()
    quotes: tuple[Quote, ...] = ()
    """Of the pools of which more is known than their node type says."""
    spot: tuple[SpotForecast, ...] = ()
    """Of each set of spot pools that a job with a deadline could use."""
    stances: Mapping[str, MarketConstraint] = field(default_factory=dict)
    """By job with a deadline; a decision finds them first of all."""
    limits: Limits = Limits()
    unmanaged: Unmanaged = Unmanaged()
    team_members: int | None = None
    """The most members that the leases of one team have together, those of jobs that are considered next included."""
    wall_ahead_s: float = 0.0
    """How far the wall clock, by which deadlines are told, is ahead of `at_s`: 0 but for hours after it was set."""
    next_node: int = 1
    """The number of the next node to be bought."""
    next_lease: int = 1
    teams: tuple[Team, ...] = ()
    """Those that are configured; any other is without quota and budget."""
    classes: Mapping[str, int] = field(default_factory=lambda: CLASSES)
    spent: Mapping[str, int] = field(default_factory=dict)
    """Micro-dollars that each job of `jobs` has cost so far."""
    spent_month: Mapping[str, int] = field(default_factory=dict)
    """And in this month: each whose budget is by the month."""
    old_s: float = 0.0
    """How old the oldest of all jobs that there ever were got: see `raytide.jobs.admission.priority`."""
    paces: Mapping[str, Throughputs] = field(default_factory=dict)
    """How fast each job of `jobs` is on each node type; those are left out that are as fast on all, as far as is
    known."""
    kept: Mapping[str, tuple[tuple[str, Resources], ...]] = field(default_factory=dict)
    """By endpoint with a replica for which there is no room: nodes, and what nobody else gets of each until there is. A
    decision finds them: see `raytide.scheduling.reservations`."""
    ray_answers: bool = True
    """False when Ray could not be asked: what it last said of its nodes is not known; nothing is given up for it."""
