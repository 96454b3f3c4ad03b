"""Isolates records: one whose handling raises is left out of the decision, and every other one is served.

A stage of the tick is a function of the Snapshot. When it raises, halves of the records are tried until those that
make it raise are found. They stay in quarantine, with the error that `raytide ps` and `raytide why` show, until they
change or their next try is due.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from raytide.core.bounds import printable
from raytide.core.logs import logger
from raytide.core.objects.endpoint import Endpoint
from raytide.core.objects.job import Job
from raytide.core.objects.plan import Plan, Wait
from raytide.core.objects.snapshot import NodeView, Snapshot

T = TypeVar("T")

log = logger(__name__)

DEMAND = "unmanaged"
"""The subject of all demand without a lease: it is one record here."""
RETRY_S, LAST_RETRY_S = 60.0, 3600.0
"""The wait before a record is tried again; it doubles with each failure."""
CHANGED_RETRY_S = 10.0
"""The least time from one try to the next of a record that its owner changes again and again."""
STAGE_LIMIT_S = 10.0
"""A stage that computes for longer is taken for one that raised."""
MOST_TRIALS, SEARCH_LIMIT_S = 48, 15.0
"""Runs of a stage within one tick that look for the records at fault, and how long they may take together. Records of
which it is not known by then are left out of this tick only."""


class StageOvertimeError(Exception):
    """A stage computed for longer than its limit."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that no decision considers, and why."""

    kind: str
    """`job`, `endpoint` or `unmanaged`."""
    error: str
    since_s: float
    tried_at_s: float
    retry_at_s: float
    failures: int
    was: object
    """What decides whether the record has changed since."""


@dataclass(slots=True)
class Quarantine:
    """The records in quarantine, from tick to tick. A new controller finds them anew."""

    limit_s: float = STAGE_LIMIT_S
    held: dict[str, Quarantined] = field(default_factory=dict)
    """By job id or endpoint name."""
    trying: set[str] = field(default_factory=set)
    """Those of `held` that this tick tries again, as long as no stage of it has failed on them."""
    errors: list[str] = field(default_factory=list)
    """Faults of this tick that belong to no record."""

    def begin(self, jobs: Mapping[str, Job], endpoints: Mapping[str, Endpoint], now_s: float) -> None:
        """Begin a tick: forget records that are over, and choose those that are tried again."""
        self.errors = []
        for subject, entry in tuple(self.held.items()):
            record: Job | Endpoint | None = jobs.get(subject) or endpoints.get(subject)
            if subject == DEMAND:
                continue
            if record is None:
                del self.held[subject]
            elif (was := _state_of(record)) != entry.was:
                retry_at_s = min(entry.retry_at_s, entry.tried_at_s + CHANGED_RETRY_S)
                self.held[subject] = replace(entry, was=was, retry_at_s=retry_at_s)
        self.trying = {subject for subject, entry in self.held.items() if entry.retry_at_s <= now_s}

    def attempt(self, what: str, act: Callable[[], T], default: T) -> T:
        """The result of `act`; `default`, and an error of this tick, when it raises. It concerns no one record."""
        try:
            return act()
        except Exception as error:  # any fault here must not stop the tick
            log.exception("part of the tick failed", extra={"what": what})
            self.errors.append(printable(f"{what}: {_words(error)}"))
            return default

    def guard(self, record: Job | Endpoint, act: Callable[[], T], default: T, now_s: float) -> T:
        """The result of `act` on this one record; `default` when it raises, and the record goes into quarantine."""
        try:
            return act()
        except Exception as error:  # whatever it is, it concerns this record alone
            subject = record.id if isinstance(record, Job) else record.name
            self._put(subject, _kind_of(record), _state_of(record), error, now_s)
            return default

    def run(self, what: str, stage: Callable[[Snapshot], T], seen: Snapshot) -> tuple[Snapshot, T | None]:
        """Returns the snapshot that the stage took, and its result; None when it raises without any record, too.

        Records in quarantine are left out until they are due for another try.
        """
        known = self.held.keys() - self.trying
        subjects = [subject for subject in _subjects(seen) if subject not in known]
        first = seen if not known else without(seen, known)
        try:
            result = self._timed(stage, first)
        except Exception as error:  # found below
            log.exception("a stage failed; looking for the records at fault", extra={"what": what})
            return self._search(what, stage, seen, subjects, error)
        return first, result

    def _search(
        self, what: str, stage: Callable[[Snapshot], T], seen: Snapshot, subjects: list[str], error: Exception
    ) -> tuple[Snapshot, T | None]:
        records: dict[str, Job | Endpoint] = {job.id: job for job in seen.jobs}
        records |= {view.endpoint.name: view.endpoint for view in seen.endpoints}
        everything = frozenset(_subjects(seen))
        good: set[str] = set()
        taken = without(seen, everything)
        try:
            result: T | None = self._timed(stage, taken)
        except Exception as empty:  # no record is at fault
            self.errors.append(printable(f"{what}: {_words(empty)}"))
            return taken, None
        parts, trials, until_s = [subjects], 1, time.monotonic() + SEARCH_LIMIT_S
        while parts and trials < MOST_TRIALS and time.monotonic() < until_s:
            part = parts.pop()
            trial = without(seen, everything - good - set(part))
            trials += 1
            try:
                result, taken = self._timed(stage, trial), trial
                good |= set(part)
            except Exception as found:  # it has a record at fault, or is one
                error = found
                if len(part) > 1:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                elif part:
                    record = records.get(part[0])
                    kind = DEMAND if record is None else _kind_of(record)
                    self._put(part[0], kind, None if record is None else _state_of(record), error, seen.at_s)
        left = sum(len(part) for part in parts)
        if left:
            self.errors.append(
                f"{what}: {left} records are not considered in this pass, until those at fault are found"
            )
        return taken, result

    def plan(self, plan: Plan | None, at_s: float) -> Plan:
        """End a tick: the plan with a Wait for each record in quarantine; an empty one where none could be made."""
        for subject in self.trying:
            self.held.pop(subject, None)
        self.trying = set()
        waits = tuple(_wait(subject, entry) for subject, entry in sorted(self.held.items()))
        actions = () if plan is None else plan.actions
        known = {action.subject for action in waits}
        kept = tuple(a for a in actions if not (isinstance(a, Wait) and a.subject in known))
        return Plan(at_s=at_s if plan is None else plan.at_s, actions=(*kept, *waits))

    def _put(self, subject: str, kind: str, was: object, error: Exception, now_s: float) -> None:
        before = self.held.get(subject)
        failures = 1 if before is None else before.failures + 1
        retry_at_s = now_s + min(RETRY_S * 2 ** min(failures - 1, 16), LAST_RETRY_S)
        since_s = now_s if before is None else before.since_s
        self.trying.discard(subject)
        self.held[subject] = Quarantined(kind, _words(error), since_s, now_s, retry_at_s, failures, was)
        log.error("quarantined", extra={"subject": subject, "error": self.held[subject].error}, exc_info=error)

    def _timed(self, stage: Callable[[Snapshot], T], seen: Snapshot) -> T:
        with _time_limit(self.limit_s):
            return stage(seen)


def without(seen: Snapshot, subjects: Collection[str]) -> Snapshot:
    """The snapshot without these jobs and endpoints. What they hold stays theirs: nodes with seats of such a job have
    nothing free for others, and are not idle."""
    jobs = tuple(job for job in seen.jobs if job.id not in subjects)
    leases = tuple(lease for lease in seen.leases if lease.job_id not in subjects)
    occupied = {
        member.node_id
        for lease in seen.leases
        if lease.job_id in subjects
        for member in lease.members
        if member.node_id
    }
    endpoints = tuple(view for view in seen.endpoints if view.endpoint.name not in subjects)
    hosts = {
        host
        for view in seen.endpoints
        if view.endpoint.name in subjects and view.load is not None
        for host in view.load.replica_nodes
    }
    nodes = tuple(
        _occupied(view) if view.node.id in occupied or view.node.ray_node_id in hosts else view for view in seen.nodes
    )
    demand = () if DEMAND in subjects else seen.demand
    return replace(seen, jobs=jobs, leases=leases, endpoints=endpoints, nodes=nodes, demand=demand)


def _occupied(view: NodeView) -> NodeView:
    nothing = dict.fromkeys(view.available, 0.0)
    return replace(view, available=nothing, idle_s=0.0, busy="a record in quarantine holds it")


def _subjects(seen: Snapshot) -> Iterator[str]:
    """The oldest records first: new ones are the likeliest to be at fault, and end up together."""
    yield from (view.endpoint.name for view in seen.endpoints)
    yield from (job.id for job in seen.jobs)
    if seen.demand:
        yield DEMAND


def _state_of(record: Job | Endpoint) -> object:
    if isinstance(record, Job):
        return record.spec, record.state, record.stop_requested
    return record.spec, record.state


def _kind_of(record: Job | Endpoint) -> str:
    return "job" if isinstance(record, Job) else "endpoint"


def _wait(subject: str, entry: Quarantined) -> Wait:
    what = "work without a lease" if subject == DEMAND else f"{entry.kind} {subject}"
    end = f"raytide stop {subject}" if entry.kind == "job" else f"raytide serve --delete {subject}"
    remedy = "" if subject == DEMAND else f"`{end}` ends it; send it again with other values. "
    return Wait(
        subject,
        "quarantined",
        f"the controller cannot handle {what}: {entry.error}.",
        f"{remedy}Everything else goes on. Please report it with the traceback in logs/controller.log.",
    )


def _words(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 300)


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """StageOvertimeError is raised in the block after that long. Only the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise StageOvertimeError(f"it computed for more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
