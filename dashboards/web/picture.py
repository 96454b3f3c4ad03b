"""The state that the web page shows: small rows about all objects, computed once a second for all viewers."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from raytide.control.api.auth import ANY_TEAM, Caller
from raytide.control.views import EndpointStatus, Live, TeamView
from raytide.core.clock import Clock
from raytide.core.money import to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.objects.endpoint_load import EndpointLoad
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import FINAL_STATES, Job
from raytide.core.objects.ledger_entry import Entry, EntryKind, OpenInterval, Share
from raytide.core.objects.node import Node, NodeType
from raytide.core.state import Store
from raytide.core.state.queries.overview import JobRow
from raytide.ledger.report import accrued, rates

Row = dict[str, Any]
Table = Mapping[str, Row]

EVERYBODY = Caller("the page", ANY_TEAM)
MOST_JOBS = 2000
ENDED_S = 900.0
"""The time for which a job that ended stays among the rows; GET /v1/jobs has the others."""
COSTS_S = 10.0
"""The time between two updates of costs. Costs grow all the time, so rows would otherwise change every second."""
_MOST_TEXT = 400
_NOTHING_MEASURED = Live(at_s=0.0)
_USES = {
    EntryKind.ENDPOINT: "serving",
    EntryKind.UNMANAGED: "unmanaged",
    EntryKind.IDLE: "idle",
    EntryKind.STARTUP: "starting",
    EntryKind.WASTE: "lost",
}


def use_of(kind: EntryKind, job_kind: str) -> str:
    """Returns the use of a node as a word: training, batch, serving, unmanaged, idle, starting or lost."""
    if kind is EntryKind.JOB:
        return "training" if job_kind == "train" else "batch"
    return _USES[kind]


@dataclass(frozen=True, slots=True)
class PagePicture:
    """The rows about all objects at one time, as a caller with access to all teams sees them. A picture is never
    changed.
    """

    at_s: float = 0.0
    status: Row = field(default_factory=dict)
    jobs: Table = field(default_factory=dict)
    nodes: Table = field(default_factory=dict)
    endpoints: Table = field(default_factory=dict)
    teams: Table = field(default_factory=dict)
    alerts: Table = field(default_factory=dict)
    price_micro_usd_h: Mapping[str, int] = field(default_factory=dict)
    """The price by team; the key "" is for the part of the fleet that no team holds."""
    cost_micro_usd: Mapping[str, int] = field(default_factory=dict)

    def seen_by(self, team: str) -> dict[str, Row | Table]:
        """Returns the part of the picture that a team may see: the team's own rows, all nodes, and alerts without a
        team.

        The row of a node lists the jobs and endpoints that hold shares of the node. Those of other teams are not named.
        The status comes last, so that a page that has received the status has all tables that the status summarizes.
        """
        is_all = team == ANY_TEAM
        price, cost = (
            sum(amounts.values()) if is_all else amounts.get(team, 0)
            for amounts in (self.price_micro_usd_h, self.cost_micro_usd)
        )
        status = {**self.status, "price_micro_usd_h": price, "cost_micro_usd": cost}
        if not is_all:
            del status["plan"]
        nodes = self.nodes if is_all else {name: _redacted(row, team) for name, row in self.nodes.items()}
        own = {"jobs": self.jobs, "endpoints": self.endpoints, "teams": self.teams}
        if not is_all:
            own = {what: {k: row for k, row in table.items() if row["team"] == team} for what, table in own.items()}
        return {"nodes": nodes, "alerts": self._alerts_of(team), **own, "status": status}

    def _alerts_of(self, team: str) -> Table:
        if team == ANY_TEAM:
            return self.alerts
        return {name: row for name, row in self.alerts.items() if row["labels"].get("team", team) == team}


def _redacted(node: Row, team: str) -> Row:
    shares = [share if share["team"] in ("", team) else {**share, "subject": "", "team": "-"} for share in node["held"]]
    return {**node, "held": shares, "reason": "", "subject": ""}


@dataclass(slots=True)
class _Known:
    """The part of a job that changes only with a commit of the controller."""

    row: Row
    lease: Lease | None


class Pictures:
    """Takes pictures of the cluster's state, one at a time. It caches values that change only when the controller
    commits.
    """

    def __init__(
        self,
        store: Store,
        config: ClusterConfig,
        clock: Clock,
        live: Callable[[], Live],
        endpoints: Callable[[Caller], list[EndpointStatus]],
        teams: Callable[[Caller], list[TeamView]],
        alerts: Callable[[Caller], list[dict[str, Any]]],
    ) -> None:
        self._store, self._config, self._clock, self._live = store, config, clock, live
        self._endpoints, self._teams, self._alerts = endpoints, teams, alerts
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._version = -1
        self._costs_at_s = float("-inf")
        self._cost_of_job: dict[str, int] = {}
        self._cost_of_team: dict[str, int] = {}
        self._cost_of_endpoint: dict[str, int] = {}
        self._team_rows: dict[str, Row] = {}

    def take(self) -> PagePicture:
        with self._lock:
            return self._take()

    def _take(self) -> PagePicture:
        now_s, live = self._clock.now_s(), self._live()
        intervals = self._store.books.intervals()
        burn = rates(intervals)
        jobs = self._store.overview.jobs(ended_after_s=now_s - ENDED_S, limit=MOST_JOBS)
        endpoints = self._endpoints(EVERYBODY)
        if abs(now_s - self._costs_at_s) >= COSTS_S:
            self._cost_of_endpoint = {each.endpoint.name: each.cost_micro_usd for each in endpoints}
            self._read_costs(intervals, [job.id for job in jobs], now_s)
        self._read_changed(jobs)
        price: Counter[str] = Counter()
        of_job: Counter[str] = Counter()
        for (kind, subject, team, _), micro_usd_h in burn.items():
            price[team] += micro_usd_h  # type: ignore[assignment]
            if kind is EntryKind.JOB:
                of_job[subject] += micro_usd_h  # type: ignore[assignment]
        places = {job_id: place for place, job_id in enumerate(live.queue, start=1)}
        kinds = {job.id: job.kind for job in jobs}
        nodes = self._store.nodes(live=True)[::-1]
        held = {each.node_id: each.occupancy for each in intervals}
        return PagePicture(
            at_s=now_s,
            status=self._status(live, jobs),
            jobs={job.id: self._job(job, live, places, of_job[job.id]) for job in jobs},
            nodes={node.id: self.node_row(node, held.get(node.id, ()), kinds, live) for node in nodes},
            endpoints=self._endpoint_rows(endpoints, live),
            teams=self._team_rows,
            alerts={_alert_id(alert): alert for alert in self._alerts(EVERYBODY)},
            price_micro_usd_h={team: round(amount) for team, amount in price.items()},
            cost_micro_usd=self._cost_of_team,
        )

    def _read_costs(self, intervals: tuple[OpenInterval, ...], ids: list[str], now_s: float) -> None:
        books = self._store.books
        self._cost_of_job = dict(books.booked("job", only=ids))
        self._cost_of_team = dict(books.booked("team"))
        for entry in accrued(intervals, to_us(now_s)):
            self._cost_of_team[entry.team] = self._cost_of_team.get(entry.team, 0) + entry.amount_micro_usd
            if entry.kind is EntryKind.JOB:
                self._cost_of_job[entry.subject] = self._cost_of_job.get(entry.subject, 0) + entry.amount_micro_usd
        self._team_rows = {view.name: _team_row(view) for view in self._teams(EVERYBODY)}
        self._costs_at_s = now_s

    def _read_changed(self, jobs: Iterable[JobRow]) -> None:
        """Reads the specs and leases of jobs that are new or were changed by the controller."""
        census, ids = self._store.census, {job.id for job in jobs}
        version = census.version()
        stale = set() if version == self._version else census.touched_since(self._version)
        wanted = [job_id for job_id in ids if job_id in stale or job_id not in self._known]
        if wanted:
            leases = census.leases(wanted)
            for job in self._store.jobs_of(wanted):
                self._known[job.id] = _Known(_spec_row(job), leases.get(job.id))
        self._known = {job_id: known for job_id, known in self._known.items() if job_id in ids}
        self._version = version

    def _status(self, live: Live, jobs: list[JobRow]) -> Row:
        return {
            "name": self._config.name,
            "jobs": self._store.census.jobs(),
            "live_jobs": sum(job.state not in FINAL_STATES for job in jobs),
            "errors": [text[:_MOST_TEXT] for text in live.errors],
            "queue": len(live.queue),
            "plan": self._store.overview.plan_number(),
        }

    def _job(self, job: JobRow, live: Live, places: Mapping[str, int], rate: float) -> Row:
        known = self._known.get(job.id)
        lease = known.lease if known is not None and job.state != "queued" else None
        waiting = None
        if job.state not in FINAL_STATES:
            waiting = live.waiting.get(job.id) or (live.waiting.get(lease.id) if lease else None)
        stance = live.stances.get(job.id)
        members = lease.members if lease is not None and job.state not in FINAL_STATES else ()
        return {
            **job._asdict(),
            **(known.row if known else {}),
            "reason": job.reason[:_MOST_TEXT],
            "progress": dict(list(job.progress.items())[:40]),
            "use": "training" if job.kind == "train" else "batch",
            "position": places.get(job.id) if job.state == "queued" else None,
            "constraint": waiting.constraint if waiting else "",
            "waiting": waiting.reason[:_MOST_TEXT] if waiting else "",
            "remedy": waiting.remedy[:_MOST_TEXT] if waiting else "",
            "wait_s": None if waiting is None or waiting.wait_s is None else round(waiting.wait_s),
            "stance": stance.reason if stance else "",
            "data": "" if job.state in FINAL_STATES else live.data.get(job.id, "")[:_MOST_TEXT],
            "ready": sum(member.is_usable for member in members),
            "members": len(members),
            "on": sorted({member.node_id for member in members if member.node_id}),
            "cost_micro_usd": self._cost_of_job.get(job.id, 0),
            "price_micro_usd_h": round(rate),
        }

    def node_row(self, node: Node, held: Iterable[Share], kinds: Mapping[str, str], live: Live) -> Row:
        use = live.use.get(node.id, {})
        shares = list(held)
        whole = max(1.0, sum(share.weight for share in shares))  # more than one if they dominate different resources
        return {
            **_named(node, "id", "type", "zone", "price_micro_usd_h", "subject"),
            **_named(node, "requested_at_s", "ready_at_s", "drain_deadline_s", "lost_at_s"),
            "market": str(node.market),
            "state": str(node.state),
            "reason": node.reason[:_MOST_TEXT],
            "use": {meter: round(signal.value, 2) for meter, signal in use.items()},
            "held": [_share(each.kind, each.subject, each.team, each.weight / whole, kinds) for each in shares],
        }

    def earlier(self, nodes: Iterable[Node], entries: Iterable[Entry], caller: Caller) -> list[Row]:
        """Returns the rows of nodes at an earlier time. `entries` are the ledger's entries of that time, which show the
        nodes' uses.
        """
        held: defaultdict[str, list[Share]] = defaultdict(list)
        for entry in entries:
            node_h = (entry.to_us - entry.from_us) / 3.6e9 * entry.price_micro_usd_h
            weight = entry.amount_micro_usd / node_h if node_h else 0.0
            held[entry.node_id].append(Share(entry.kind, entry.subject, entry.team, weight))
        subjects = {share.subject for shares in held.values() for share in shares if share.kind is EntryKind.JOB}
        kinds = {job.id: str(job.spec.kind) for job in self._store.jobs_of(sorted(subjects))}
        rows = [self.node_row(node, held[node.id], kinds, _NOTHING_MEASURED) for node in nodes]
        return rows if caller.only_team is None else [_redacted(row, caller.only_team) for row in rows]

    def types(self) -> dict[str, Row]:
        """Returns the rows of all node types that can be bought, by name."""
        return {each.name: _type_row(each) for each in self._config.node_types}

    def _endpoint_rows(self, statuses: Iterable[EndpointStatus], live: Live) -> dict[str, Row]:
        serving = self._store.rollouts.all_serving()
        rows = {}
        for status in statuses:
            name = status.endpoint.name
            now = serving.get(name)
            cost = self._cost_of_endpoint.setdefault(name, status.cost_micro_usd)
            rows[name] = _endpoint_row(status, live.loads.get(now.application if now else name), cost)
        return rows


def _named(value: object, *names: str) -> Row:
    """Returns these attributes of the object by name."""
    return {name: getattr(value, name) for name in names}


def _alert_id(alert: Row) -> str:
    return " ".join([alert["name"], *(f"{name}={value}" for name, value in sorted(alert["labels"].items()))])


def _share(kind: EntryKind, subject: str, team: str, weight: float, kinds: Mapping[str, str]) -> Row:
    use = use_of(kind, kinds.get(subject, ""))
    return {"use": use, "subject": subject, "team": team, "weight": round(weight, 4)}


def _spec_row(job: Job) -> Row:
    spec = job.spec
    shape = spec.gang.shapes[0]
    return {
        **_named(spec, "priority", "due_at_s", "budget_usd"),
        "gang": shape.describe(),
        "gpus": shape.resources.get("GPU", 0.0) * shape.members,
        "cpus": shape.resources.get("CPU", 0.0) * shape.members,
        "wanted": shape.members,
    }


def _team_row(view: TeamView) -> Row:
    spec = view.spec
    return {
        "team": view.name,
        **_named(spec, "parent", "weight"),
        **_named(spec.budget, "soft_usd", "hard_usd"),
        "quota": dict(spec.quota),
        "spent_micro_usd": view.spent_micro_usd,
        "used": dict(view.use.used),
        "own": dict(view.use.own),
        "available": dict(view.use.available),
        "recent_gpu_h": round(view.use.recent_gpu_h, 2),
    }


def _type_row(each: NodeType) -> Row:
    return {
        **_named(each, "price_micro_usd_h", "max_nodes"),
        "market": str(each.market),
        "zones": list(each.zones),
        "zone_prices": {zone: each.price_in(zone) for zone in each.zones},
        "gpus": each.resources.get("GPU", 0.0),
        "cpus": each.resources.get("CPU", 0.0),
        "accelerator": each.labels.get("ray.io/accelerator-type", ""),
    }


def _endpoint_row(status: EndpointStatus, load: EndpointLoad | None, cost_micro_usd: int) -> Row:
    endpoint, spec = status.endpoint, status.endpoint.spec
    traffic = load.traffic if load else None
    replicas = load.replicas if load else ()
    counted: defaultdict[str, float] = defaultdict(float)
    for replica in replicas:
        for name in ("requests", "output_tokens", "finished", "late"):
            counted[name] += getattr(replica.counters, name)
    return {
        "id": endpoint.name,
        "team": spec.team,
        **_named(endpoint, "user", "created_at_s"),
        **_named(status, "base_url", "revision"),
        **_named(spec.replicas, "min", "max", "slo_ttft_s", "slo_target"),
        "model": spec.version or spec.model,
        "state": str(endpoint.state),
        "reason": endpoint.reason[:_MOST_TEXT],
        "is_hosted": spec.backend is not None,
        "target": endpoint.target_replicas,
        "ready": status.ready_replicas,
        "ongoing": round(status.ongoing, 1),
        "queued": round(load.queued, 1) if load else 0.0,
        "rps": round(traffic.requests_rps, 2) if traffic else 0.0,
        "ahead_rps": round(traffic.ahead_rps, 2) if traffic else 0.0,
        "tps": round(traffic.output_tps, 1) if traffic else 0.0,
        "prompt_tps": round(traffic.prompt_tps, 1) if traffic else 0.0,
        "ttft_s": round(traffic.ttft_s, 4) if traffic and traffic.ttft_s is not None else None,
        "kv_use": round(fmean(replica.kv_use for replica in replicas), 3) if replicas else None,
        "cold_start_s": round(status.cold_start_s, 1),
        "waiting": status.waiting.reason[:_MOST_TEXT] if status.waiting else "",
        "starting": sum(not each.is_ready for each in status.startups),
        "cost_micro_usd": cost_micro_usd,
        "counted": dict(counted),
        "replicas": [
            {**_named(each, "id", "node", "running", "waiting"), "kv_use": round(each.kv_use, 3)} for each in replicas
        ],
    }
