"""Metrics of nodes, GPUs, the queue, the controller, money and backups."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from raytide.autoscaler.nodes.exporter.kernel import oom_kills
from raytide.autoscaler.nodes.lifecycle import CANCELLED, ENDED_BY_PROVIDER, TAKEN_BACK
from raytide.control.api.health import HealthMonitor
from raytide.control.backup.results import BackupResults
from raytide.control.views import Live
from raytide.core.money import MICRO, month_of
from raytide.core.objects.cluster_config import BackupSection, ClusterConfig
from raytide.core.objects.job import JobKind
from raytide.core.objects.ledger_entry import EntryKind, OpenInterval, Share
from raytide.core.objects.node import Node, NodeMeasurement
from raytide.core.objects.team import TeamSpec
from raytide.core.state import Store
from raytide.core.state.queries.jobs import HeldJob, WaitingJob
from raytide.core.state.queries.ledger import LedgerQueries
from raytide.core.telemetry.catalogue import control, cost, infrastructure, queue, training
from raytide.core.telemetry.metrics import Metric, MetricSample
from raytide.ledger.report import hours_left_in_month, rates

_USES = {
    EntryKind.ENDPOINT: "serving",
    EntryKind.UNMANAGED: "unmanaged",
    EntryKind.IDLE: "idle",
    EntryKind.WASTE: "idle",
    EntryKind.STARTUP: "starting",
}
MOST_REPORTS = 20
"""The most values reported by a job's own code that the metrics show: the first ones by name."""
_REPORTED: Mapping[str, Metric] = {
    "step": training.JOB_STEP,
    "loss": training.JOB_LOSS,
    "tokens_per_s": training.JOB_TOKENS_PER_SECOND,
    "mfu": training.JOB_MFU,
    "step_s": training.JOB_STEP_SECONDS,
    "data_wait": training.JOB_DATA_WAIT,
    "scaling": training.JOB_SCALING,
}
_AGES: Mapping[str, Metric] = {"step_at_s": training.JOB_LAST_STEP_AGE, "saved_at_s": training.JOB_CHECKPOINT_AGE}
"""Metrics of the seconds since a time that a job reports, by the name under which it reports this time."""
_ANOTHER_WAY = frozenset(
    {
        "steps", "restarts", "resizes", "steps_lost", "recovery_s", "world", "settled", "left_s", "redo_s", "lost_s",
        "lost_at_s", "slowest_rank", "slowest_ratio", "peak_bytes",
    }
)  # fmt: skip
"""Names that raytide's own drivers report for its decisions; they are not the user's values."""


def cluster_samples(
    store: Store,
    live: Live,
    watch: HealthMonitor,
    config: ClusterConfig,
    intervals: Sequence[OpenInterval],
    held: Sequence[HeldJob],
) -> Iterator[MetricSample]:
    yield MetricSample(infrastructure.DISK_FREE, watch.free_bytes())
    if (kills := oom_kills()) is not None:
        yield MetricSample(infrastructure.NODE_OOM_KILLS, kills, ("head",))
    troubles = {trouble.code for trouble in watch.troubles()}
    yield from (MetricSample(control.TROUBLE, code in troubles, (code,)) for code in ("disk", "store", "controller"))
    nodes = store.nodes(live=True)
    yield from _node_samples(store, nodes)
    yield from _gpu_samples(nodes, config, intervals, {job.id for job in held if job.kind == JobKind.TRAIN})
    yield from (MetricSample(queue.JOBS, count, labels) for labels, count in sorted(store.census.live_jobs().items()))
    members = store.census.live_members()
    yield from (MetricSample(queue.LEASE_MEMBERS, count, (state,)) for state, count in sorted(members.items()))
    for node_id, use in live.use.items():
        for meter, signal in use.items():
            yield MetricSample(infrastructure.NODE_USE, signal.value, (node_id, meter))
    for node_id, measured in live.measured.items():
        yield from _machine_samples(node_id, measured)
    for pool in store.pools():
        yield MetricSample(infrastructure.POOL_FAILURES, pool.failures, (pool.node_type, pool.zone))
    yield MetricSample(control.TICKS, live.ticks)
    yield MetricSample(control.TICK_SECONDS, live.tick_s)
    kinds = Counter({"job": 0, "endpoint": 0})
    kinds.update(live.quarantined.values())
    yield from (MetricSample(control.QUARANTINED, count, (kind,)) for kind, count in sorted(kinds.items()))
    yield MetricSample(control.ERRORS, live.errors_total)


def _node_samples(store: Store, nodes: Sequence[Node]) -> Iterator[MetricSample]:
    counts = Counter((node.type, str(node.market), str(node.state)) for node in nodes)
    yield from (MetricSample(infrastructure.NODES, count, labels) for labels, count in sorted(counts.items()))
    prices: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        if node.started_at_s is not None:
            prices[(node.type, str(node.market))] += node.price_micro_usd_h
    yield from (MetricSample(cost.NODE_PRICE, price / MICRO, labels) for labels, price in sorted(prices.items()))
    lost: Counter[tuple[str, str]] = Counter()
    noticed: Counter[tuple[str, ...]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for each in store.census.node_ends(TAKEN_BACK, ENDED_BY_PROVIDER, CANCELLED):
        lost[(each.type, each.market)] += each.lost
        noticed[(each.type,)] += each.taken_back
        failed[(each.type, each.zone)] += each.failed
    for metric, found in (
        (infrastructure.NODES_LOST, lost),
        (infrastructure.SPOT_NOTICES, noticed),
        (infrastructure.LAUNCH_FAILURES, failed),
    ):
        yield from (MetricSample(metric, count, labels) for labels, count in sorted(found.items()))


def _gpu_samples(
    nodes: Sequence[Node], config: ClusterConfig, intervals: Sequence[OpenInterval], training: set[str]
) -> Iterator[MetricSample]:
    """Yields the number of GPUs of the billed nodes by use and market. A shared node's GPUs are split as the ledger
    books its cost."""
    gpus_of = {node_type.name: node_type.resources.get("GPU", 0.0) for node_type in config.node_types}
    occupancies = {interval.node_id: interval.occupancy for interval in intervals}
    gpus: defaultdict[tuple[str, str], float] = defaultdict(float)
    for node in nodes:
        count = gpus_of.get(node.type, 0.0)
        shares = occupancies.get(node.id, ())
        whole = sum(share.weight for share in shares)
        if count and whole:
            for share in shares:
                gpus[_use(share, training), str(node.market)] += count * share.weight / whole
    yield from (MetricSample(infrastructure.GPUS, count, labels) for labels, count in sorted(gpus.items()))


def _use(share: Share, training: set[str]) -> str:
    if share.kind is EntryKind.JOB:
        return "training" if share.subject in training else "batch"
    return _USES[share.kind]


def _machine_samples(node_id: str, measured: NodeMeasurement) -> Iterator[MetricSample]:
    reading = measured.reading
    for metric, label, value in (
        (infrastructure.NODE_USE, "memory", reading.memory_use),
        (infrastructure.NODE_USE, "disk", reading.disk_use),
        (infrastructure.NODE_NETWORK, "in", reading.network_in_bps),
        (infrastructure.NODE_NETWORK, "out", reading.network_out_bps),
        (infrastructure.NODE_DISK, "read", reading.disk_read_bps),
        (infrastructure.NODE_DISK, "write", reading.disk_write_bps),
    ):
        if value is not None:
            yield MetricSample(metric, value, (node_id, label))
    if measured.reading.clock_skew_s is not None:
        yield MetricSample(infrastructure.NODE_CLOCK_SKEW, measured.reading.clock_skew_s, (node_id,))
    if measured.reading.oom_kills is not None:
        yield MetricSample(infrastructure.NODE_OOM_KILLS, measured.reading.oom_kills, (node_id,))
    for source, watts in measured.power_w.items():
        yield MetricSample(infrastructure.NODE_POWER, watts, (node_id, source))
    for source, joules in measured.joules.items():
        yield MetricSample(infrastructure.NODE_ENERGY, joules, (node_id, source))


def cost_samples(
    books: LedgerQueries, teams: Mapping[str, TeamSpec], intervals: Sequence[OpenInterval], now_us: int
) -> Iterator[MetricSample]:
    """Yields the booked cost in dollars by kind of ledger entry. For each team with a budget, yields the share of the
    monthly budget that is spent now, and the share that will be spent by the month's end at the present rate. A team's
    budget also pays for the teams below it."""
    booked = books.booked("kind")
    yield from (MetricSample(cost.BOOKED, amount / MICRO, (kind,)) for kind, amount in sorted(booked.items()))
    spent, burn = Counter[str](), Counter[str]()
    for team, booked_micro_usd in books.spent([], month_of(now_us)).teams_month.items():
        spent.update(dict.fromkeys(_payers(team, teams), booked_micro_usd))
    for (_, _, team, _), micro_usd_h in rates(intervals).items():
        burn.update(dict.fromkeys(_payers(team, teams), round(micro_usd_h)))
    for name, spec in sorted(teams.items()):
        budget_usd = spec.budget.soft_usd if spec.budget.hard_usd is None else spec.budget.hard_usd
        if budget_usd:
            amount = spent[name]
            at_end = amount + burn[name] * hours_left_in_month(now_us)
            yield MetricSample(cost.BUDGET_USED, amount / MICRO / budget_usd, (name,))
            yield MetricSample(cost.BUDGET_FORECAST, at_end / MICRO / budget_usd, (name,))


def _payers(team: str, teams: Mapping[str, TeamSpec]) -> Iterator[str]:
    """Yields the team and its ancestors."""
    while team in teams:
        yield team
        team = teams[team].parent


def backup_samples(settings: BackupSection, results: BackupResults, now_s: float) -> Iterator[MetricSample]:
    """Yields the age and failures of backups, and the figures of the last drill. A task that has never run
    is not reported as overdue, so that a new cluster raises no alert."""
    tasks = [("backup", results.backup, settings.every_s), ("drill", results.drill, settings.drill_every_s)]
    if settings.cold_repository:
        tasks.append(("cold", results.cold, settings.cold_every_s))
    for task, run, period_s in tasks:
        yield MetricSample(control.BACKUP_FAILING, bool(run.error), (task,))
        if run.at_s:
            yield MetricSample(control.BACKUP_OVERDUE, max(0.0, now_s - run.at_s) / period_s, (task,))
    if results.backup.at_s:
        yield MetricSample(control.BACKUP_AGE, max(0.0, now_s - results.backup.at_s))
        yield MetricSample(control.BACKUP_ADDED, results.backup.added_bytes)
    if (found := results.found) is not None:
        yield MetricSample(control.BACKUP_RESTORE, found.restore_s)
        yield MetricSample(control.BACKUP_LOST, found.lost_s)
        yield MetricSample(control.BACKUP_PROBLEMS, len(found.problems))


def job_samples(held: Iterable[HeldJob], waiting: Iterable[WaitingJob], now_s: float) -> Iterator[MetricSample]:
    """Yields the last values that the jobs in `held` reported, and the seconds that each job in `waiting` has waited so
    far.
    """
    for job in held:
        labels = (job.id, job.team)
        yield MetricSample(training.JOB_RESTARTS, job.restarts, (*labels, "driver"))
        yield MetricSample(training.JOB_RESTARTS, _number(job.progress, "restarts") or 0, (*labels, "gang"))
        for name, metric in _REPORTED.items():
            if (value := _number(job.progress, name)) is not None:
                yield MetricSample(metric, value, labels)
        if (is_finite := _is_finite(job.progress, "loss")) is not None:
            yield MetricSample(training.JOB_LOSS_FINITE, is_finite, labels)
        for name, metric in _AGES.items():
            if (at_s := _number(job.progress, name)) is not None:
                yield MetricSample(metric, max(0.0, now_s - at_s), labels)
        if (failure := job.progress.get("not_saved")) is not None:
            yield MetricSample(training.JOB_CHECKPOINT_FAILING, bool(failure), labels)
        rank, ratio = _number(job.progress, "slowest_rank"), _number(job.progress, "slowest_ratio")
        if rank is not None and ratio is not None:
            yield MetricSample(training.JOB_STRAGGLER, ratio, (*labels, f"{rank:.0f}"))
        own = sorted(job.progress.keys() - _REPORTED.keys() - _AGES.keys() - _ANOTHER_WAY)
        numbers = ((name, value) for name in own if (value := _number(job.progress, name)) is not None)
        for name, value in islice(numbers, MOST_REPORTS):
            yield MetricSample(training.JOB_REPORT, value, (*labels, name))
    for each in waiting:
        yield MetricSample(queue.GANG_PENDING, max(0.0, now_s - each.since_s), (each.id, each.team))


def _number(progress: Mapping[str, object], name: str) -> float | None:
    value = progress.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _is_finite(progress: Mapping[str, object], name: str) -> bool | None:
    """Returns False for NaN and infinity, which a job's stored progress holds as texts; None for what is no number."""
    value = progress.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return math.isfinite(float(value))
    except ValueError:
        return None
