"""Isolates records that cause an error in a stage of the tick, so that all other records are still handled.

A stage is a function of the Snapshot. If a stage raises, a bisection finds the records that cause the error. These
records are quarantined, and `raytide ps` and `raytide why` show the error. A quarantined record is retried after a
while, or sooner if the record changes. The record leaves quarantine when a retry raises no error.
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
from raytide.core.objects.plan import UNMANAGED, Plan, Wait
from raytide.core.objects.snapshot import NodeView, Snapshot

T = TypeVar("T")

log = logger(__name__)

RETRY_S, LAST_RETRY_S = 60.0, 3600.0
"""The wait in seconds before a record is retried; it doubles with each failure."""
CHANGED_RETRY_S = 10.0
"""The shortest time between retries of a record that its owner keeps changing."""
STAGE_LIMIT_S = 10.0
"""The longest run of a stage; a longer one counts as a failure."""
MOST_TRIALS, SEARCH_LIMIT_S = 48, 15.0
"""The most runs, and seconds, of one tick's search for records at fault. Records not yet checked are left out of this
tick only."""


class StageOvertimeError(Exception):
    """Raised when a stage exceeds its time limit."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A record that is excluded from decisions, and the error that the record caused."""

    kind: str
    """`job`, `endpoint` or `unmanaged`."""
    error: str
    since_s: float
    tried_at_s: float
    retry_at_s: float
    failures: int
    was: object
    """The part of the record whose change triggers a retry."""


@dataclass(slots=True)
class Quarantine:
    """The quarantined records, kept from tick to tick. A new controller finds these records again."""

    limit_s: float = STAGE_LIMIT_S
    held: dict[str, Quarantined] = field(default_factory=dict)
    """Records by job id or endpoint name."""
    trying: set[str] = field(default_factory=set)
    """The records of `held` that this tick retries and that have not failed yet."""
    errors: list[str] = field(default_factory=list)
    """Errors of this tick that belong to no record."""

    def begin_tick(self, jobs: Mapping[str, Job], endpoints: Mapping[str, Endpoint], now_s: float) -> None:
        """Begins a tick. Drops records that no longer exist from the quarantine, and selects the records to retry."""
        self.errors = []
        for subject, entry in tuple(self.held.items()):
            record: Job | Endpoint | None = jobs.get(subject) or endpoints.get(subject)
            if subject == UNMANAGED:
                continue
            if record is None:
                del self.held[subject]
            elif (was := _state_of(record)) != entry.was:
                retry_at_s = min(entry.retry_at_s, entry.tried_at_s + CHANGED_RETRY_S)
                self.held[subject] = replace(entry, was=was, retry_at_s=retry_at_s)
        self.trying = {subject for subject, entry in self.held.items() if entry.retry_at_s <= now_s}

    def attempt(self, what: str, act: Callable[[], T], default: T) -> T:
        """Returns the result of `act`, a step that does not belong to any single record. If `act` raises, adds the
        error to `errors` and returns `default`."""
        try:
            return act()
        except Exception as error:  # must not stop the tick
            log.exception("part of the tick failed", extra={"what": what})
            self.errors.append(printable(f"{what}: {_error_text(error)}"))
            return default

    def guard(self, record: Job | Endpoint, act: Callable[[], T], default: T, now_s: float) -> T:
        """Returns the result of `act`, which handles this one record. If `act` raises, returns `default` and
        quarantines the record.

        `act` is called even if the record is already in quarantine. If it then raises, the quarantine is extended
        only if the record's retry is due.
        """
        try:
            return act()
        except Exception as error:  # it concerns only this record
            subject = record.id if isinstance(record, Job) else record.name
            if subject not in self.held or subject in self.trying:  # else each tick would double the wait
                self._add(subject, _kind_of(record), _state_of(record), error, now_s)
            return default

    def run_stage(self, what: str, stage: Callable[[Snapshot], T], snapshot: Snapshot) -> tuple[Snapshot, T | None]:
        """Runs a stage of the tick. Quarantined records are left out of the snapshot, unless their retry is due.

        If the stage raises, runs it again with parts of the snapshot, to find the records at fault and leave them
        out. Returns the snapshot of the last run that succeeded, and the result of that run. If the stage raises
        even for a snapshot without records, returns that snapshot and None.
        """
        known = self.held.keys() - self.trying
        subjects = [subject for subject in _subjects(snapshot) if subject not in known]
        first = snapshot if not known else without_subjects(snapshot, known)
        try:
            result = self._timed(stage, first)
        except Exception as error:  # the search finds the cause
            log.exception("a stage failed; looking for the records at fault", extra={"what": what})
            return self._search(what, stage, snapshot, subjects, error)
        return first, result

    def _search(
        self, what: str, stage: Callable[[Snapshot], T], snapshot: Snapshot, subjects: list[str], error: Exception
    ) -> tuple[Snapshot, T | None]:
        records: dict[str, Job | Endpoint] = {job.id: job for job in snapshot.jobs}
        records |= {view.endpoint.name: view.endpoint for view in snapshot.endpoints}
        everything = frozenset(_subjects(snapshot))
        good: set[str] = set()
        taken = without_subjects(snapshot, everything)
        try:
            result: T | None = self._timed(stage, taken)
        except Exception as empty:  # no record is at fault
            self.errors.append(printable(f"{what}: {_error_text(empty)}"))
            return taken, None
        parts, trials, until_s = [subjects], 1, time.monotonic() + SEARCH_LIMIT_S
        while parts and trials < MOST_TRIALS and time.monotonic() < until_s:
            part = parts.pop()
            trial = without_subjects(snapshot, everything - good - set(part))
            trials += 1
            try:
                result, taken = self._timed(stage, trial), trial
                good |= set(part)
            except Exception as found:  # it contains a record at fault, or is one
                error = found
                if len(part) > 1:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                elif part:
                    record = records.get(part[0])
                    kind = UNMANAGED if record is None else _kind_of(record)
                    self._add(part[0], kind, None if record is None else _state_of(record), error, snapshot.at_s)
        left = sum(len(part) for part in parts)
        if left:
            self.errors.append(
                f"{what}: {left} records are not considered in this tick, until those at fault are found"
            )
        return taken, result

    def end_tick(self, plan: Plan | None, at_s: float) -> Plan:
        """Ends a tick. Returns the plan with a Wait added for each quarantined record. If `plan` is None, the result
        has only these Waits."""
        for subject in self.trying:
            self.held.pop(subject, None)
        self.trying = set()
        waits = tuple(_wait(subject, entry) for subject, entry in sorted(self.held.items()))
        actions = () if plan is None else plan.actions
        known = {action.subject for action in waits}
        kept = tuple(a for a in actions if not (isinstance(a, Wait) and a.subject in known))
        return Plan(at_s=at_s if plan is None else plan.at_s, actions=(*kept, *waits))

    def _add(self, subject: str, kind: str, was: object, error: Exception, now_s: float) -> None:
        before = self.held.get(subject)
        failures = 1 if before is None else before.failures + 1
        retry_at_s = now_s + min(RETRY_S * 2 ** min(failures - 1, 16), LAST_RETRY_S)
        since_s = now_s if before is None else before.since_s
        self.trying.discard(subject)
        self.held[subject] = Quarantined(kind, _error_text(error), since_s, now_s, retry_at_s, failures, was)
        log.error("quarantined", extra={"subject": subject, "error": self.held[subject].error}, exc_info=error)

    def _timed(self, stage: Callable[[Snapshot], T], snapshot: Snapshot) -> T:
        with _raise_after(self.limit_s):
            return stage(snapshot)


def without_subjects(snapshot: Snapshot, subjects: Collection[str]) -> Snapshot:
    """Returns the snapshot without these jobs and endpoints. Their nodes stay in the snapshot and are marked as
    occupied, so that nothing else is placed on them.
    """
    jobs = tuple(job for job in snapshot.jobs if job.id not in subjects)
    leases = tuple(lease for lease in snapshot.leases if lease.job_id not in subjects)
    occupied = {
        member.node_id
        for lease in snapshot.leases
        if lease.job_id in subjects
        for member in lease.members
        if member.node_id
    }
    endpoints = tuple(view for view in snapshot.endpoints if view.endpoint.name not in subjects)
    hosts = {
        host
        for view in snapshot.endpoints
        if view.endpoint.name in subjects and view.load is not None
        for host in view.load.replica_nodes
    }
    nodes = tuple(
        _occupied(view) if view.node.id in occupied or view.node.ray_node_id in hosts else view
        for view in snapshot.nodes
    )
    demand = () if UNMANAGED in subjects else snapshot.demand
    return replace(snapshot, jobs=jobs, leases=leases, endpoints=endpoints, nodes=nodes, demand=demand)


def _occupied(view: NodeView) -> NodeView:
    nothing = dict.fromkeys(view.available, 0.0)
    return replace(view, available=nothing, idle_s=0.0, busy="used by a quarantined record")


def _subjects(snapshot: Snapshot) -> Iterator[str]:
    """Yields the ids of records, oldest first, so that bisection separates new records, which are likelier at fault,
    from old ones.
    """
    yield from (view.endpoint.name for view in snapshot.endpoints)
    yield from (job.id for job in snapshot.jobs)
    if snapshot.demand:
        yield UNMANAGED  # all demand without a lease counts as one record


def _state_of(record: Job | Endpoint) -> object:
    if isinstance(record, Job):
        return record.spec, record.state, record.stop_requested
    return record.spec, record.state


def _kind_of(record: Job | Endpoint) -> str:
    return "job" if isinstance(record, Job) else "endpoint"


def _wait(subject: str, entry: Quarantined) -> Wait:
    what = "work without a lease" if subject == UNMANAGED else f"{entry.kind} {subject}"
    end = f"raytide stop {subject}" if entry.kind == "job" else f"raytide serve --delete {subject}"
    remedy = "" if subject == UNMANAGED else f"`{end}` ends it; submit it again with other values. "
    return Wait(
        subject,
        "quarantined",
        f"the controller cannot handle {what}: {entry.error}.",
        f"{remedy}Everything else continues. Please report it with the traceback in logs/controller.log.",
    )


def _error_text(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 300)


@contextmanager
def _raise_after(limit_s: float) -> Iterator[None]:
    """Raises StageOvertimeError in the block after `limit_s` seconds. It works in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise StageOvertimeError(f"took more than {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, late)
    # Again and again: one alarm may come where its error is swallowed, or wake another thread than this one.
    signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
