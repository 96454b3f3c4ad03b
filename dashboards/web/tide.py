"""The tide: how the node time of the last hours was used. It is computed from the ledger, so it adds up to the bill."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from raytide.control.api.auth import Caller
from raytide.core.clock import Clock
from raytide.core.money import to_us
from raytide.core.objects.cluster_config import ClusterConfig
from raytide.core.state import Store
from raytide.core.state.queries.overview import NodeHours
from raytide.dashboards.web.picture import use_of
from raytide.ledger.report import accrued

FRESH_S = 15.0
"""The age up to which a reading of the unfinished steps is reused."""
OPEN_S = 1200.0
"""The age up to which steps are read again, because entries are booked about a minute after they began."""
MOST_STEPS = 400


@dataclass(frozen=True, slots=True)
class UseSeries:
    """The GPU hours, CPU hours and cost per step, for one use of nodes (such as training or idle) in one market.

    The market is spot or on demand.
    """

    use: str
    market: str
    gpu_h: tuple[float, ...]
    cpu_h: tuple[float, ...]
    micro_usd: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TideView:
    at_s: float
    from_s: float
    """The start of the first step; steps are aligned to whole multiples of their length."""
    step_s: float
    series: tuple[UseSeries, ...]


class Tide:
    """Sums of the ledger's entries by time step and use. Time steps that can no longer change are read only once."""

    def __init__(self, store: Store, config: ClusterConfig, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._resources = {each.name: each.resources for each in config.node_types}
        self._lock = threading.Lock()
        self._kept: dict[int, dict[int, list[NodeHours]]] = {}
        """Finished steps by length and begin, in microseconds."""
        self._read_at_s: dict[int, float] = {}
        self._booked: dict[int, int] = {}
        """The number of the newest entry at the last reading, by the length of the steps."""

    def view(self, caller: Caller, since_s: float, step_s: float) -> TideView:
        """Returns the sums of the last `since_s` seconds in steps of `step_s`. A team sees only its own share."""
        step_us = max(to_us(max(step_s, since_s / MOST_STEPS)), 60_000_000)
        now_s = self._clock.now_s()
        last_us = to_us(now_s) // step_us * step_us
        steps = max(1, min(MOST_STEPS, math.ceil(since_s * 1e6 / step_us)))
        begin_us = last_us - (steps - 1) * step_us
        with self._lock:
            kept = self._read(begin_us, last_us + step_us, step_us, now_s)
            found = [
                ((begin - begin_us) // step_us, hours)
                for begin, part in kept.items()
                if begin >= begin_us
                for hours in part
            ]
        sums: defaultdict[tuple[str, str], list[list[float]]] = defaultdict(lambda: [[0.0] * steps for _ in range(3)])
        found += [(steps - 1, hours) for hours in self._open_hours(to_us(now_s))]
        for step, hours in found:
            if caller.sees(hours.team):
                self._add(sums[(use_of(hours.kind, hours.job_kind), hours.market)], step, hours)
        series = tuple(_series(use, market, *rows) for (use, market), rows in sorted(sums.items()))
        return TideView(now_s, begin_us / 1e6, step_us / 1e6, series)

    def _read(self, begin_us: int, end_us: int, step_us: int, now_s: float) -> Mapping[int, list[NodeHours]]:
        """Returns the entries of each step. It first reads the steps that are missing or whose entries
        may still grow.
        """
        kept = self._kept.setdefault(step_us, {})
        if now_s - self._read_at_s.get(step_us, float("-inf")) < FRESH_S and begin_us in kept:
            return kept
        newest, earliest_us = self._store.overview.booked_since(self._booked.get(step_us))
        grows_us = to_us(now_s - OPEN_S)
        if earliest_us is not None:  # lost work, or costs that were booked late because nobody booked for a while
            grows_us = min(grows_us, earliest_us)
        grows_us = grows_us // step_us * step_us
        missing = [begin for begin in range(begin_us, end_us, step_us) if begin not in kept or begin >= grows_us]
        if missing:
            first = missing[0]
            for begin in range(first, end_us, step_us):
                kept[begin] = []
            for hours in self._store.overview.node_hours(first, end_us, step_us):
                kept[first + hours.step * step_us].append(hours)
        for begin in [begin for begin in kept if begin < begin_us]:
            del kept[begin]
        self._read_at_s[step_us], self._booked[step_us] = now_s, newest
        if len(self._kept) > 8:  # a page asks for few lengths; anyone may ask for any
            self._kept, self._read_at_s, self._booked = {step_us: kept}, {step_us: now_s}, {step_us: newest}
        return kept

    def _open_hours(self, now_us: int) -> list[NodeHours]:
        """Returns the node hours that are not booked yet: at most the last minute of each node."""
        nodes = {node.id: node for node in self._store.nodes(live=True)}
        kinds = {job.id: job.kind for job in self._store.overview.jobs(ended_after_s=now_us / 1e6, limit=10_000)}
        return [
            NodeHours(
                0,
                entry.kind,
                kinds.get(entry.subject, ""),
                entry.team,
                nodes[entry.node_id].type,
                str(nodes[entry.node_id].market),
                entry.amount_micro_usd / entry.price_micro_usd_h,
                entry.amount_micro_usd,
            )
            for entry in accrued(self._store.books.intervals(), now_us)
            if entry.node_id in nodes and entry.price_micro_usd_h
        ]

    def _add(self, rows: list[list[float]], step: int, hours: NodeHours) -> None:
        resources = self._resources.get(hours.node_type, {})
        rows[0][step] += hours.node_h * resources.get("GPU", 0.0)
        rows[1][step] += hours.node_h * resources.get("CPU", 0.0)
        rows[2][step] += hours.amount_micro_usd


def _series(use: str, market: str, gpu_h: list[float], cpu_h: list[float], micro_usd: list[float]) -> UseSeries:
    return UseSeries(
        use,
        market,
        tuple(round(each, 4) for each in gpu_h),
        tuple(round(each, 4) for each in cpu_h),
        tuple(round(each) for each in micro_usd),
    )
