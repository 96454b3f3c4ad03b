"""The dataclasses that the API returns: stored records joined with the controller's last observation, and their
JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from raytide.core.io.atomic_file import read_json
from raytide.core.io.html import ShownAsHtml, framed, table
from raytide.core.money import format_usd
from raytide.core.objects.api_key import ApiKey, KeySpending, UsageRow
from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.endpoint_load import EndpointLoad, ReplicaLive, ReplicaStartup
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job, JobState
from raytide.core.objects.node import Node, NodeMeasurement, Use
from raytide.core.objects.snapshot import MarketConstraint
from raytide.core.objects.team import TeamSpec
from raytide.core.specs.rollout import CountedRevision, Rollout
from raytide.core.telemetry.targets import Target
from raytide.ledger.report import By, CostRow

T = TypeVar("T")

_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Returns the adapter of a type, cached because building one is slow."""
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def to_json(value: object) -> Any:
    """Returns a dataclass of raytide, or a Config, as plain JSON values."""
    return _adapter(type(value)).dump_python(value, mode="json")


def from_json(cls: type[T], data: object) -> T:
    """Returns the value that `to_json` has written. Fields that only a later release knows are ignored."""
    value: T = _adapter(cls).validate_python(data, extra="ignore")
    return value


class AsJson:
    """A base class that gives dataclasses of the SDK a method `json`."""

    __slots__ = ()

    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = to_json(self)
        return value


@dataclass(frozen=True, slots=True)
class Waiting:
    """The reason why a job, lease or endpoint waits, from the controller's last decision."""

    constraint: str
    reason: str
    remedy: str = ""
    wait_s: float | None = None
    """The forecast time until it starts, in seconds, if nothing else arrives; None if unknown."""


@dataclass(frozen=True, slots=True)
class TeamUse:
    """A team's usage and spending at the controller's last decision."""

    used: Mapping[str, float]
    """Amounts by resource, for resources with a quota."""
    own: Mapping[str, float]
    available: Mapping[str, float]
    """The amounts that the team may still use, of its own and of borrowed quota."""
    committed_micro_usd: int
    """This month's spending and the reservations of running jobs."""
    recent_gpu_h: float


@dataclass(frozen=True, slots=True)
class Live:
    """The last tick's observation, written to `live.json`. Losing the file does no harm."""

    at_s: float
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """Reasons by id of the job or lease, or name of the endpoint."""
    queue: tuple[str, ...] = ()
    """The ids of waiting jobs in scheduling order."""
    teams: Mapping[str, TeamUse] = field(default_factory=dict)
    stances: Mapping[str, MarketConstraint] = field(default_factory=dict)
    """The market constraints of deadline jobs, by job id."""
    data: Mapping[str, str] = field(default_factory=dict)
    """For jobs that pay for moving data to their nodes: a text with the cost that this adds to their price, by job id.
    """
    loads: Mapping[str, EndpointLoad] = field(default_factory=dict)
    """Loads by name of the endpoint."""
    use: Mapping[str, Use] = field(default_factory=dict)
    """The last measured utilization of each node, by node id."""
    measured: Mapping[str, NodeMeasurement] = field(default_factory=dict)
    """The last reading, power and energy of each node, by node id."""
    targets: tuple[Target, ...] = ()
    """The metrics pages of nodes and replicas."""
    errors: tuple[str, ...] = ()
    """The errors of sources and actions that failed."""
    quarantined: Mapping[str, str] = field(default_factory=dict)
    """The kind of each quarantined record; `waiting` has its error."""
    ticks: int = 0
    """The number of ticks of this controller process."""
    tick_s: float = 0.0
    """The duration of the last tick in seconds."""
    errors_total: int = 0


def last_pass_s(live_path: Path) -> float:
    """Returns the time of the controller's last tick, by the controller's clock. Returns 0.0 if the time is unknown."""
    try:
        at_s = (read_json(live_path) or {}).get("at_s")
    except (OSError, ValueError):
        return 0.0
    return float(at_s) if isinstance(at_s, int | float) else 0.0


@dataclass(frozen=True, slots=True)
class JobView(ShownAsHtml):
    job: Job
    position: int | None
    """The position in the queue, from 1; None once admitted."""
    cost_micro_usd: int
    price_micro_usd_h: int
    lease: Lease | None = None
    waiting: Waiting | None = None
    stance: MarketConstraint | None = None
    """The markets of a deadline job; None for other jobs."""
    month_micro_usd: int | None = None
    """The cost booked this month (UTC), for jobs with a monthly budget."""
    data: str = ""
    """A text with the cost that moving data to the job's nodes adds (`metadata.raytide.transfer`); empty if nothing is
    paid.
    """


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a replica's output. Everything that looks like a secret has been removed from it."""

    replica: str
    at: str
    """The time (ISO 8601) in the line; if it has none, that of the line before it."""
    text: str


@dataclass(frozen=True, slots=True)
class EndpointLogPart:
    """A part of the output of an endpoint's replicas."""

    lines: list[LogLine]
    after: str
    """The position of the next part."""
    has_more: bool
    """True if the next part exists already."""
    missing: tuple[str, ...] = ()
    """Replicas whose node does not answer."""
    gone: Mapping[str, str] = field(default_factory=dict)
    """The replicas whose node was not asked because it is gone, with its name and the reason."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """A part of a job's log."""

    text: str
    after: str
    """The position of the next part."""
    has_more: bool
    """True if the next part exists already."""


@dataclass(frozen=True, slots=True)
class EndpointStatus(ShownAsHtml):
    endpoint: Endpoint
    base_url: str
    """The base URL for OpenAI clients."""
    ready_replicas: int
    ongoing: float
    cost_micro_usd: int
    waiting: Waiting | None = None
    cold_start_s: float = 0.0
    """The expected seconds from requesting a replica until it answers."""
    cold_start_is_learned: bool = False
    """True if the time is learned from the endpoint's starts, not configured."""
    paces: Mapping[str, float] = field(default_factory=dict)
    """The throughput of a replica on each node type, relative to the lowest; empty if types count as equal."""
    startups: tuple[ReplicaStartup, ...] = ()
    """The starts of its replicas."""
    live: tuple[ReplicaLive, ...] = ()
    """The adapters and weights on each replica that answers."""
    revision: int = 0
    """The revision that serves; 0 for a revision under rollout."""
    previous: int = 0
    """The revision that served before it; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class RevisionOutcome:
    """The request counts of one revision in a rollout."""

    revision: int
    version: str
    """The registered version of its model, if it has one."""
    counts: CountedRevision
    shares: Mapping[str, tuple[float, float, float]]
    """The shares of bad requests by criterion, each with the limits of its 95 % interval."""


@dataclass(frozen=True, slots=True)
class RolloutStatus(ShownAsHtml):
    rollout: Rollout
    champion: RevisionOutcome
    challenger: RevisionOutcome


@dataclass(frozen=True, slots=True)
class ClusterStatus(AsJson):
    name: str
    at_s: float
    controller_age_s: float | None
    """The time since the controller's last tick; None if it never ticked."""
    nodes: tuple[Node, ...]
    jobs: Mapping[str, int]
    """The number of jobs by state."""
    endpoints: int
    price_micro_usd_h: int
    cost_micro_usd: int
    """The cost so far. This and the price are those of the caller's team, or of all teams for a token for all teams."""
    ray: str
    """The URL of Ray's dashboard, which is also the address for `ray job submit`."""
    ray_environment: Mapping[str, str]
    """Environment variables with which Ray's commands and drivers on this machine connect to the cluster."""
    serve: str
    """The base URL of all endpoints."""
    errors: tuple[str, ...] = ()
    head: str = ""
    """The machine that leads; empty in a cluster with one head."""
    standbys: tuple[str, ...] = ()
    """The machines that wait to take over."""
    prometheus: str = ""
    """The URL of the cluster's Prometheus; empty without `--monitoring`."""
    alertmanager: str = ""

    def _repr_html_(self) -> str:
        jobs = ", ".join(f"{count} {state}" for state, count in self.jobs.items()) or "none"
        money = f"{format_usd(self.cost_micro_usd)} so far, {format_usd(self.price_micro_usd_h)} an hour"
        nodes = [(node.id, f"{node.type} in {node.zone}: {node.state}") for node in self.nodes]
        rows = [("jobs", jobs), ("endpoints", self.endpoints), ("cost", money), ("Ray", self.ray), *nodes]
        return framed(table(self.name, ("", ""), [*rows, *(("trouble", error) for error in self.errors)]))


@dataclass(frozen=True, slots=True)
class WhyView(ShownAsHtml):
    """The answer of `raytide why JOB` and `raytide why unmanaged`."""

    job: str
    state: JobState | None
    """The job's state; None for `unmanaged`."""
    position: int | None
    """The position in the queue, from 1."""
    constraint: str
    """The first unmet constraint; empty if the subject does not wait."""
    reason: str
    remedy: str
    wait_s: float | None
    """The forecast time until it starts, in seconds, if nothing else arrives; None if unknown."""
    stance: MarketConstraint | None = None
    """The markets that a deadline job may use, and why; None for other jobs."""
    data: str = ""
    """A text with the cost that moving data to the job's nodes adds; empty if nothing is paid."""


@dataclass(frozen=True, slots=True)
class TeamView(ShownAsHtml):
    name: str
    spec: TeamSpec
    spent_micro_usd: int
    """This month's spending."""
    use: TeamUse
    given: tuple[str, ...] = ()
    """The fields set by `raytide quota` or `raytide budget`, which override the configuration."""


@dataclass(frozen=True, slots=True)
class KeyView:
    """An API key, with the spending of all keys of its account."""

    key: ApiKey
    spending: KeySpending


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new API key with its secret, which is shown only once and stored nowhere."""

    key: ApiKey
    secret: str


@dataclass(frozen=True, slots=True)
class UsagePage:
    rows: tuple[UsageRow, ...]
    before: int | None
    """The value of `before` that requests the next page; None on the last page."""


@dataclass(frozen=True, slots=True)
class CostTable(AsJson):
    by: By
    rows: tuple[CostRow, ...]
    total_micro_usd: int
    forecast_micro_usd: int
    grams_co2_per_kwh: float = 0.0
    """The emissions per kWh that the cluster's configuration states."""

    @property
    def kwh(self) -> float:
        """The energy of all rows in kWh."""
        return sum(row.kwh for row in self.rows)

    def co2_kg(self, kwh: float) -> float:
        """Returns the estimated emissions, in kilograms of CO2, of this much energy."""
        return kwh * self.grams_co2_per_kwh / 1000.0

    def _repr_html_(self) -> str:
        def used(kwh: float) -> tuple[str, ...]:
            return (f"{kwh:.3f}", f"{self.co2_kg(kwh):.3f}") if self.kwh else ()

        rows = [
            (
                x.key,
                *map(format_usd, (x.amount_micro_usd, x.lost_micro_usd, x.micro_usd_h, x.forecast_micro_usd)),
                *used(x.kwh),
            )
            for x in self.rows
        ]
        total = ("total", format_usd(self.total_micro_usd), "", "", format_usd(self.forecast_micro_usd))
        energy = ("kWh", "kg CO2 (estimate)") if self.kwh else ()
        columns = (self.by, "cost", "lost", "now, an hour", "at the month's end", *energy)
        rows.append((*total, *used(self.kwh)))
        return framed(table(f"cost by {self.by}", columns, rows))


@dataclass(frozen=True, slots=True)
class CostLine:
    kind: str
    subject: str
    team: str
    amount_micro_usd: int


@dataclass(frozen=True, slots=True)
class CostReport(AsJson):
    """The ledger compared with the provider's bill."""

    lines: tuple[CostLine, ...]
    booked_micro_usd: int
    """The sum of all entries."""
    accrued_micro_usd: int
    """The cost of open intervals up to now, which is not booked yet."""
    billed_micro_usd: int
    """The provider's bill for all ended nodes."""
    booked_ended_micro_usd: int
    """The booked cost of the same nodes, which equals the bill to the micro-dollar."""

    def _repr_html_(self) -> str:
        total = format_usd(self.booked_micro_usd + self.accrued_micro_usd)
        rows = [(x.kind, x.subject, x.team, format_usd(x.amount_micro_usd)) for x in self.lines]
        return framed(table("cost", ("for", "whose", "team", "cost"), [*rows, ("total", "", "", total)]))
