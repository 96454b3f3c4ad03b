"""What the API shows: records of the state store joined with what the controller saw last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from raytide.core.io.atomic_file import read_json
from raytide.core.money import format_usd
from raytide.core.objects.endpoint import Endpoint, EndpointLoad
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.node import Node, Use
from raytide.core.objects.snapshot import MarketConstraint
from raytide.core.objects.team import TeamSpec
from raytide.ledger.report import By, CostRow

T = TypeVar("T")

_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Built once for each type: that is the slow part."""
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def to_json(value: object) -> Any:
    """A core dataclass or Config as plain JSON values."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(cls: type[T], data: object) -> T:
    value: T = _adapter(cls).validate_python(data)
    return value


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a subject waits for, as the last decision said it."""

    constraint: str
    reason: str
    remedy: str = ""
    wait_s: float | None = None
    """When it would start if nothing else came; None when nobody can tell."""


@dataclass(frozen=True, slots=True)
class TeamUse:
    """What a team may, holds and spends, as the last decision saw it."""

    used: Mapping[str, float]
    """Of each resource that any team has a quota of."""
    own: Mapping[str, float]
    available: Mapping[str, float]
    """How much more it may hold, borrowed or its own."""
    committed_micro_usd: int
    """Spent this month, and reserved by what runs."""
    recent_gpu_h: float


@dataclass(frozen=True, slots=True)
class Live:
    """What the controller saw in its last tick. It is written whole to `live.json`; losing it loses nothing."""

    at_s: float
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """By job, lease or endpoint."""
    queue: tuple[str, ...] = ()
    """Jobs that waited for a lease, in the order in which they get their turn."""
    teams: Mapping[str, TeamUse] = field(default_factory=dict)
    stances: Mapping[str, MarketConstraint] = field(default_factory=dict)
    """By job with a deadline."""
    loads: Mapping[str, EndpointLoad] = field(default_factory=dict)
    """By endpoint."""
    use: Mapping[str, Use] = field(default_factory=dict)
    """What the meters of each node said last."""
    errors: tuple[str, ...] = ()
    """Sources that did not answer, and actions that failed."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """The kind of each record that the controller cannot handle; `waiting` has the error."""
    ticks: int = 0
    """Of this controller process."""
    tick_s: float = 0.0
    """How long the last one took."""
    errors_total: int = 0


def last_pass_s(live_path: Path) -> float:
    """When a controller finished its last pass, by its clock; 0.0 when that is not known."""
    try:
        at_s = (read_json(live_path) or {}).get("at_s")
    except (OSError, ValueError):
        return 0.0
    return float(at_s) if isinstance(at_s, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class JobView:
    job: Job
    position: int | None
    """Place in the queue, 1 is next; None once admitted."""
    cost_micro_usd: int
    price_micro_usd_h: int
    lease: Lease | None = None
    waiting: Waiting | None = None
    stance: MarketConstraint | None = None
    """Of a job with a deadline."""
    month_micro_usd: int | None = None
    """Of its cost, what is booked in this month (UTC); of a job whose budget is by the month."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """Some of what a job printed."""

    text: str
    after: str
    """Where the next part begins."""
    has_more: bool
    """There is a next part already."""


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    endpoint: Endpoint
    base_url: str
    """For the OpenAI client."""
    ready_replicas: int
    ongoing: float
    cost_micro_usd: int
    waiting: Waiting | None = None
    cold_start_s: float = 0.0
    """How long a replica that is asked for now is taken to need until it answers."""
    cold_start_is_learned: bool = False
    """From its own starts; else it is the configured one."""
    paces: Mapping[str, float] = field(default_factory=dict)
    """What a replica does on each node type, in units of where it does least; empty when all are taken for alike."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    name: str
    at_s: float
    controller_age_s: float | None
    """Since the controller's last tick; None when it never ticked."""
    nodes: tuple[Node, ...]
    jobs: Mapping[str, int]
    """Count by state."""
    endpoints: int
    price_micro_usd_h: int
    cost_micro_usd: int
    """So far, all nodes."""
    ray: str
    """Ray's dashboard, which is also the address for `ray job submit`."""
    ray_environment: Mapping[str, str]
    """With it, Ray's own commands and drivers on this machine find the cluster and may enter it."""
    serve: str
    """Below it each endpoint has its own path."""
    errors: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = to_json(self)
        return value

    def _repr_html_(self) -> str:
        from raytide.core.io.notebook import table

        jobs = ", ".join(f"{count} {state}" for state, count in self.jobs.items()) or "none"
        money = f"{format_usd(self.cost_micro_usd)} so far, {format_usd(self.price_micro_usd_h)} an hour"
        nodes = [(node.id, f"{node.type} in {node.zone}: {node.state}") for node in self.nodes]
        rows = [("jobs", jobs), ("endpoints", self.endpoints), ("cost", money), ("Ray", self.ray), *nodes]
        return table(self.name, ("", ""), [*rows, *(("trouble", error) for error in self.errors)])


@dataclass(frozen=True, slots=True)
class WhyView:
    """`raytide why JOB`, or `raytide why unmanaged`."""

    job: str
    state: JobState | None
    """None of `unmanaged`."""
    position: int | None
    """In the queue's order, from 1."""
    constraint: str
    """The first that is unmet; "" when it waits for nothing."""
    reason: str
    remedy: str
    wait_s: float | None
    """When it would start if nothing else came; None when nobody can tell."""
    stance: MarketConstraint | None = None
    """Of a job with a deadline: where it may sit, and why."""


@dataclass(frozen=True, slots=True)
class TeamView:
    name: str
    spec: TeamSpec
    spent_micro_usd: int
    """This month."""
    use: TeamUse
    given: tuple[str, ...] = ()
    """The fields of the spec that `raytide quota` or `raytide budget` set: those no longer follow the configuration."""


@dataclass(frozen=True, slots=True)
class CostTable:
    by: By
    rows: tuple[CostRow, ...]
    total_micro_usd: int
    forecast_micro_usd: int


@dataclass(frozen=True, slots=True)
class CostLine:
    kind: str
    subject: str
    team: str
    amount_micro_usd: int


@dataclass(frozen=True, slots=True)
class CostReport:
    """The ledger beside the provider's bill, over nodes that have ended and nodes that have not."""

    lines: tuple[CostLine, ...]
    booked_micro_usd: int
    """Sum of the entries."""
    accrued_micro_usd: int
    """Not booked yet: open intervals up to now."""
    billed_micro_usd: int
    """What the provider bills for all ended nodes."""
    booked_ended_micro_usd: int
    """What the ledger booked for those same nodes: equal to the bill, to the micro-dollar."""

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = to_json(self)
        return value

    def _repr_html_(self) -> str:
        from raytide.core.io.notebook import table

        total = format_usd(self.booked_micro_usd + self.accrued_micro_usd)
        rows = [(x.kind, x.subject, x.team, format_usd(x.amount_micro_usd)) for x in self.lines]
        return table("cost", ("for", "whose", "team", "cost"), [*rows, ("total", "", "", total)])
