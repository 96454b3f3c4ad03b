"""Work is lost to what strikes a gang: noted then, and booked once its driver says how much it has to do again. Pure.

Only the driver knows what its last checkpoint held: it reports `lost_s`, the seconds of all work done again so far, and
`lost_at_s`, when it last broke off. What it lost by its own fault stays its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from raytide.core.money import to_us
from raytide.core.objects.gang import Lease
from raytide.core.objects.job import Job
from raytide.core.objects.ledger_entry import Entry
from raytide.ledger.losses import lost

PATIENCE_S = 60.0
"""How far apart the moments may lie at which the driver broke off and the controller saw why."""

TOGETHER_S = 10.0
"""Before a gang works again after a loss."""


@dataclass(frozen=True, slots=True)
class Losses:
    jobs: tuple[Job, ...] = ()
    """Those whose word is in the books now."""
    entries: tuple[Entry, ...] = ()


def nodes_lost(before: Lease, after: Lease) -> tuple[str, ...]:
    """From under members that were usable and had not been asked to give way."""
    pairs = zip(before.members, after.members, strict=True)
    gone = [was.node_id for was, now in pairs if was.is_usable and not was.is_yielding and now.node_id != was.node_id]
    return tuple(dict.fromkeys(gone))


def on_disruption(job: Job, by: Sequence[str], now_s: float) -> Job:
    """What strikes a gang that was struck just now did so together with that."""
    if not by:
        return job
    is_one = job.struck_at_s is not None and now_s - job.struck_at_s <= TOGETHER_S
    names = [*job.struck_by.split(", "), *by] if is_one else by
    return replace(job, struck_at_s=now_s, struck_by=", ".join(dict.fromkeys(names)))


def on_preemption(job: Job, by: Sequence[str], now_s: float) -> Job:
    """Of one that is asked to give way. It saves its work before it does: what is lost so soon after a strike was lost
    to that, until it told of it."""
    is_struck = job.struck_at_s is not None and now_s - job.struck_at_s <= PATIENCE_S
    return job if is_struck and not _told_of_strike(job) else on_disruption(job, by, now_s)


def settled_losses(jobs: Iterable[Job], now_s: float) -> frozenset[str]:
    """Who told of a loss whose cause is known, or will not be known any more."""
    return frozenset(
        job.id
        for job in jobs
        if _told_s(job) != job.lost_s and (_cause(job) or job.is_final or now_s - _broke_at_s(job) > PATIENCE_S)
    )


def book_losses(
    jobs: Iterable[Job], new: Sequence[Entry], booked: Callable[[str, int], Sequence[Entry]], now_s: float
) -> Losses:
    """`jobs`: the ripe ones. `new`: what this tick books, up to now on the nodes that they hold; `booked`: what was
    booked of a job and ends later than a moment."""
    settled, entries = list[Job](), list[Entry]()
    for job in jobs:
        told_s = _told_s(job)
        more_s = told_s - job.lost_s if told_s > job.lost_s else told_s  # a new driver counts from nothing
        more_s = min(more_s, job.held_for_s(now_s))
        if cause := _cause(job):
            until_us, lost_us = to_us(min(_broke_at_s(job), now_s)), to_us(more_s)
            mine = [*booked(job.id, until_us - lost_us), *(entry for entry in new if entry.subject == job.id)]
            entries += lost(mine, until_us, lost_us, cause)
        settled.append(replace(job, lost_s=told_s))
    return Losses(tuple(settled), tuple(entries))


def _cause(job: Job) -> str:
    """What struck it when it broke off; "" when nothing did."""
    is_near = job.struck_at_s is not None and abs(job.struck_at_s - _broke_at_s(job)) <= PATIENCE_S
    return job.struck_by if is_near else ""


def _told_of_strike(job: Job) -> bool:
    """Whether what it lost to what struck it last is in the books."""
    is_since = job.struck_at_s is not None and _broke_at_s(job) >= job.struck_at_s - TOGETHER_S
    return is_since and _told_s(job) == job.lost_s


def _told_s(job: Job) -> float:
    """What the ledger knows when the driver does not say both, how much and when."""
    lost_s = job.progress_number("lost_s")
    return job.lost_s if lost_s is None or job.progress_number("lost_at_s") is None else max(0.0, lost_s)


def _broke_at_s(job: Job) -> float:
    return job.progress_number("lost_at_s") or 0.0
