"""The input of a decision, frozen at one instant: the time, prices, records and observations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaValue
from raytide.core.objects.gang import Lease
from raytide.core.objects.hardware.transfer import TransferSection
from raytide.core.objects.job import Job
from raytide.core.objects.node import CapacityType, Node, NodeType, Resources, Use
from raytide.core.objects.team import CLASSES, Team

Throughputs = Mapping[str, float]
"""Throughput by node type, relative to the slowest; empty if all are equal, or if it is unknown."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's record, joined with Ray's current report of the node."""

    node: Node
    total: Resources
    """The resources that Ray reports; until the node has joined, those of its type."""
    available: Resources
    """The resources that are free in Ray, without those of placement groups, actors and tasks; equal to `total` until
    the node has joined.
    """
    labels: Mapping[str, str]
    idle_s: float = 0.0
    """The seconds since anything ran on the node, by raytide's own clock; 0 if it is busy or not ready."""
    is_draining: bool = False
    """True if Ray itself reports that it gives the node no new work. Until then, a drain is repeated."""
    use: Use = field(default_factory=dict)
    """The last values of its meters, however old."""
    busy: str = ""
    """The reason why it is not idle although Ray reports it as idle; empty if there is none."""

    @property
    def stable_total(self) -> Resources:
        """The node's total resources without the object store. Ray reports a smaller total for the object store as
        objects fill it."""
        return {name: amount for name, amount in self.total.items() if name != "object_store_memory"}


@dataclass(frozen=True, slots=True)
class EndpointView:
    endpoint: Endpoint
    load: EndpointLoad | None
    """The last load; None without any report."""
    worth: ReplicaValue | None = None
    """The value of replicas of an endpoint with an SLO; None if unknown."""
    pools: tuple[tuple[str, str], ...] | None = None
    """The node type and zone of each new replica, set by the decision; None to buy where it is cheapest."""
    given_up: tuple[str, ...] = ()
    """The nodes that its replicas leave, set by the same decision."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Work that has no lease and that Ray cannot place: `count` requests, each for `resources` on a node that matches
    `labels`.
    """

    resources: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    count: int = 1
    together: str = ""
    """A node label of which all nodes of this demand must have the same value."""
    apart: str = ""
    """The label of the nodes that already hold a bundle of the same placement group, whose bundles must be on different
    nodes.
    """
    is_standing: bool = False
    """True for resources that were requested from Ray without work (`request_resources`): they stay, used or not, until
    the request changes.
    """


@dataclass(frozen=True, slots=True)
class Pool:
    """The launch backoff of one pool, which is a node type in one zone. The backoff is reset when a node of the pool
    joins.
    """

    node_type: str
    zone: str
    failures: int = 0
    """Consecutive failures."""
    retry_at_s: float = 0.0
    reason: str = ""
    """The reason of the last failure."""


@dataclass(frozen=True, slots=True)
class Quote:
    """The present price of a pool's nodes, and the rate at which the provider reclaims nodes. `PoolRisk` in
    autoscaler/spot/pool_risk.py learns this rate."""

    node_type: str
    zone: str
    price_micro_usd_h: int | None = None
    """The price in micro-dollars an hour; None: that of the node type."""
    deaths_per_h: float = 0.0


@dataclass(frozen=True, slots=True)
class MarketConstraint:
    markets: tuple[CapacityType, ...] | None
    """The allowed markets, the wanted one first; empty while the job waits for spot. None allows any market, for a late
    job.
    """
    is_urgent: bool
    """True if no time is left for another attempt on spot: the job then goes first in its class, and is not
    preempted."""
    due_at_s: float
    work_s: float | None
    """Seconds of work left, with a margin; None if unknown."""
    latest_s: float | None
    """The latest time at which to request on-demand nodes, unless the job already works on other nodes."""
    reason: str

    @property
    def wanted(self) -> CapacityType | None:
        """The market that the job must use. None while the job waits, or if it may use any market."""
        return self.markets[0] if self.markets else None


@dataclass(frozen=True, slots=True)
class SpotForecast:
    """A group of spot pools that are watched as one market. It contains the rates of the market's changes, which were
    learned from observations. `raytide.autoscaler.spot.availability_model` defines these rates.
    """

    pools: tuple[str, ...]
    is_up: tuple[bool, ...]
    """The last reported availability of each pool."""
    since_s: tuple[float, ...]
    lost: tuple[float, ...]
    switched: tuple[tuple[float, ...], ...]
    found: tuple[float, ...]
    zone_hazard: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the fleet's hourly cost, and on the rate at which the fleet changes. A limit that is None does not
    apply.
    """

    soft_micro_usd_h: int | None = None
    """The cost above which only spot is bought."""
    hard_micro_usd_h: int | None = None
    """The cost above which nothing is bought."""
    launches_per_min: int | None = None
    """The most nodes launched in a minute. A gang is launched whole, even above this limit."""
    moves_after_s: float | None = 600.0
    """The age in seconds from which a node may be left for a cheaper one; None: never."""
    shrink_for_serving: bool = True
    """True if replicas that do not fit preempt spare members of elastic gangs of lower classes."""
    most_micro_usd_h: int | None = None
    """The cost above which, by a margin, the least valuable nodes are removed until the fleet costs this much."""
    max_nodes: int | None = None
    """The most nodes of all types together: `max_workers` of cluster.yaml."""


@dataclass(frozen=True, slots=True)
class Unmanaged:
    """Limits on the nodes that may be bought for work without a lease."""

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
    """Quotes of the pools that differ from their node type."""
    spot: tuple[SpotForecast, ...] = ()
    """One forecast for each set of spot pools that a deadline job could use."""
    stances: Mapping[str, MarketConstraint] = field(default_factory=dict)
    """The market constraints of deadline jobs, by job id; computed by the first step of a decision."""
    limits: Limits = Limits()
    transfer: TransferSection | None = None
    """The price of getting data to nodes; None: it costs nothing."""
    unmanaged: Unmanaged = Unmanaged()
    team_members: int | None = None
    """The most members that the leases of one team have together, including those of the jobs considered next."""
    wall_ahead_s: float = 0.0
    """The seconds by which the wall clock, to which deadlines refer, is ahead of `at_s`. It is nonzero for hours after
    the wall clock was set.
    """
    next_node: int = 1
    """The number of the next node to buy."""
    next_lease: int = 1
    teams: tuple[Team, ...] = ()
    """The configured teams; all others have no quota and no budget."""
    classes: Mapping[str, int] = field(default_factory=lambda: CLASSES)
    spent: Mapping[str, int] = field(default_factory=dict)
    """The total cost in micro-dollars by job id, for the jobs in `jobs`."""
    spent_month: Mapping[str, int] = field(default_factory=dict)
    """This month's cost in micro-dollars by job id, for jobs with a monthly budget."""
    old_s: float = 0.0
    """The greatest age that any job has reached: see `raytide.queue.admission.priority`."""
    paces: Mapping[str, Throughputs] = field(default_factory=dict)
    """The relative throughput by job id and node type, for the jobs in `jobs` for which differences are known."""
    kept: Mapping[str, tuple[tuple[str, Resources], ...]] = field(default_factory=dict)
    """The nodes reserved for each endpoint with an unplaced replica, with the resources reserved on each.

    A decision finds them: see `raytide.scheduling.reservations`.
    """
    ray_answers: bool = True
    """False if Ray did not answer: the free resources of its nodes are then unknown, and no node is released."""
