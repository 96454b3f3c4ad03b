"""Books the work that a gang lost to a disruption, once the gang's driver has reported the amount.

Only the driver knows the gang's last checkpoint. It reports `lost_s`, the total seconds of work that it had to repeat,
and `lost_at_s`, the time of its last interruption. Work lost through the job's own fault remains the job's cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from raytide.core.money import to_us
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.core.objects.ledger_entry import Entry
from raytide.ledger.book import lost

CAUSE_WINDOW_S = 60.0
"""The most seconds between the driver's interruption and the controller's observation of its cause."""

SAME_DISRUPTION_S = 10.0
"""Disruptions within this time count as one, because the gang does not work in between."""

_MOST_CAUSE_BYTES = 1000
"""The longest text that names the causes of a loss. Each entry of the loss has it, and PostgreSQL refuses entries with
more than 2.7 kB of compressed text in the columns that must be unique together.
"""


@dataclass(frozen=True, slots=True)
class Losses:
    jobs: tuple[Job, ...] = ()
    """The jobs whose reported loss is booked."""
    entries: tuple[Entry, ...] = ()


def lost_nodes(before: Lease, after: Lease) -> tuple[str, ...]:
    """Returns the nodes that members of a lease lost between two states of the lease. Members that were unusable or
    were giving way are ignored.
    """
    pairs = zip(before.members, after.members, strict=True)
    gone = [was.node_id for was, now in pairs if was.is_usable and not was.gives_way and now.node_id != was.node_id]
    return tuple(dict.fromkeys(gone))


def on_disruption(job: Job, by: Sequence[str], now_s: float) -> Job:
    """Returns a copy of the job that records a disruption with the causes `by`. Disruptions within SAME_DISRUPTION_S of
    each other count as one.
    """
    if not by:
        return job
    is_one = job.struck_at_s is not None and now_s - job.struck_at_s <= SAME_DISRUPTION_S
    names = [*job.struck_by.split(", "), *by] if is_one else by
    return replace(job, struck_at_s=now_s, struck_by=_joined(names))


def on_preemption(job: Job, by: Sequence[str], now_s: float) -> Job:
    """Returns a copy of the job that records a preemption with the causes `by`.

    Returns the job unchanged if it recently had a disruption and the driver has not reported the lost work yet. The
    lost work is then due to the disruption, because a preempted gang saves its work before it leaves its nodes.
    """
    is_struck = job.struck_at_s is not None and now_s - job.struck_at_s <= CAUSE_WINDOW_S
    return job if is_struck and not _is_reported(job) else on_disruption(job, by, now_s)


def settled_losses(jobs: Iterable[Job], now_s: float) -> frozenset[str]:
    """Returns the ids of jobs whose newly reported loss can be booked. A loss can be booked if its cause is known. It
    can also be booked if it is too late for a cause to become known.
    """
    return frozenset(
        job.id
        for job in jobs
        if _reported_s(job) != job.lost_s
        and (_cause(job) or job.is_final or now_s - _interrupted_at_s(job) > CAUSE_WINDOW_S)
    )


def book_losses(
    jobs: Iterable[Job], new: Sequence[Entry], booked: Callable[[str, int], Sequence[Entry]], now_s: float
) -> Losses:
    """Returns two things: the jobs with updated `lost_s`, and the ledger entries for the time that was newly reported
    as lost.

    `new` are this tick's ledger entries. `booked(job_id, after_us)` returns earlier entries that end after
    `after_us`.
    """
    settled, entries = list[Job](), list[Entry]()
    for job in jobs:
        told_s = _reported_s(job)
        more_s = told_s - job.lost_s if told_s > job.lost_s else told_s  # a new driver counts from zero
        more_s = min(more_s, job.held_for_s(now_s))
        if cause := _cause(job):
            until_us, lost_us = to_us(min(_interrupted_at_s(job), now_s)), to_us(more_s)
            entries_of_job = [*booked(job.id, until_us - lost_us), *(entry for entry in new if entry.subject == job.id)]
            entries += lost(entries_of_job, until_us, lost_us, cause)
        settled.append(replace(job, lost_s=told_s))
    return Losses(tuple(settled), tuple(entries))


def _cause(job: Job) -> str:
    """Returns the cause of the job's last interruption: what disrupted it at about that time; empty if nothing did."""
    is_near = job.struck_at_s is not None and abs(job.struck_at_s - _interrupted_at_s(job)) <= CAUSE_WINDOW_S
    return _joined(job.struck_by.split(", ")) if is_near else ""  # an earlier release may have stored more names


def _joined(names: Iterable[str]) -> str:
    """Returns the distinct names in one text. It names only the first ones if all would be too long."""
    text = ""
    for name in dict.fromkeys(names):
        longer = f"{text}, {name}" if text else name
        if len(longer.encode()) > _MOST_CAUSE_BYTES:
            break
        text = longer
    return text


def _is_reported(job: Job) -> bool:
    """Returns whether the driver has reported the loss of the job's last disruption, and the ledger contains that
    loss."""
    is_since = job.struck_at_s is not None and _interrupted_at_s(job) >= job.struck_at_s - SAME_DISRUPTION_S
    return is_since and _reported_s(job) == job.lost_s


def _reported_s(job: Job) -> float:
    """Returns the seconds of lost work that the driver reports; the seconds already booked if the report is
    incomplete."""
    lost_s = job.progress_number("lost_s")
    return job.lost_s if lost_s is None or job.progress_number("lost_at_s") is None else max(0.0, lost_s)


def _interrupted_at_s(job: Job) -> float:
    return job.progress_number("lost_at_s") or 0.0
