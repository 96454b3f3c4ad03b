"""The scheduling order of all jobs, both waiting and running. Jobs are ordered by priority class. Within a class, the
job with the least attained service goes first, with some corrections.

Pure least attained service starves large gangs and preempts long jobs late. The corrections are:
- An overdue gang goes before all jobs except urgent and new ones. A gang is overdue only if it has
  waited at least four hours. It must also have waited longer than every smaller job, or longer than it
  would wait under first come, first served.
- A gang that has waited nearly as long as it would under first come, first served goes before other long
  jobs.
- A job that has already run for long is preempted only for short jobs.
- The few oldest jobs go last, because they are late in any case.

The order does not depend on the durations of jobs, which are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NEW_GPU_S, SHORT_GPU_S = 3600.0, 36000.0
"""The attained service in GPU-seconds up to which a job counts as new, and as short."""
GANG = 8
"""The number of GPUs from which a job counts as a gang, which is hard to place."""
PATIENCE_S = 4 * 3600.0
"""The seconds that a gang must have waited to be overdue."""
LATE_FROM, KEPT_LATE_FROM, KEPT_OVERDUE_FROM = 0.85, 0.5, 0.9
"""Shares of the wait under first come, first served. From LATE_FROM on, a gang goes before other long jobs, and from 1
on it is overdue. A gang with GPUs keeps these ranks down to the other two shares: the wait that it is compared with
grows while it runs, so that it would otherwise soon be preempted, and wait again."""
WELL_IN_S = 8 * 3600.0
"""The seconds of run time above which a smaller job counts as short, until it goes last."""
OLD_S = 72 * 3600.0
LAST_SHARE = 0.005
"""A smaller job goes last once it is older than `OLD_S`, and older than all but this share of all jobs ever became."""

URGENT, NEW, OVERDUE, SHORT, LATE, LONGER, LAST = range(7)
"""The bands, in scheduling order."""


@dataclass(frozen=True, slots=True, eq=False)
class QueueTable:
    """One row for each job that waits for GPUs or holds some."""

    gpus: Floats
    submitted_s: Floats
    attained_gpu_s: Floats
    """The work done, in GPU-seconds."""
    held_s: Floats
    """The time with GPUs, over all runs of the job."""
    queued_s: Floats
    """The waiting time, over all waits of the job."""
    priority: Ints
    """The number of the job's priority class; higher numbers go first."""
    share: Floats
    """The recent use of each job's team divided by the team's weight; within a band, the lowest goes first."""
    is_held: Bools
    is_preemptible: Bools
    """True if the job holds GPUs and may be preempted."""
    in_cooldown: Bools
    """True if the job was preempted a short while ago and therefore preempts no other."""
    is_urgent: Bools
    """True if the job has a deadline and no time to spare."""
    within_nominal_quota: Bools
    """True if the job, together with the jobs of its team before it, is within the team's nominal quota."""
    aging_cutoff_s: float = 0.0
    """The age that only `LAST_SHARE` of all jobs, including finished ones, have exceeded."""

    @property
    def age_s(self) -> Floats:
        return self.held_s + self.queued_s


def ranked(table: QueueTable) -> Ints:
    """Returns the row indices in scheduling order."""
    return np.asarray(np.lexsort((table.submitted_s, table.share, bands(table), -table.priority)))


def waiting(table: QueueTable, order: Ints) -> Ints:
    """Returns the waiting rows in scheduling order. Rows within their team's nominal quota come before rows that borrow
    quota.

    In any other order, a borrowing job could be admitted in one cycle and preempted in the next.
    """
    rows = order[~table.is_held[order]]
    return rows[np.argsort(~table.within_nominal_quota[rows], kind="stable")]


def bands(table: QueueTable) -> Ints:
    is_gang = table.gpus >= GANG
    is_last = ~is_gang & (table.age_s > max(OLD_S, table.aging_cutoff_s))
    band = np.where(table.attained_gpu_s < SHORT_GPU_S, SHORT, LONGER)
    band[~is_gang & (table.held_s > WELL_IN_S)] = SHORT
    band[is_last] = LAST
    # In a long queue all jobs wait long: a gang is overdue when it has waited longer than the others.
    others_s, fair_s = table.queued_s[~is_gang & ~is_last].max(initial=0.0), fair_wait_s(table)
    late_s = fair_s * np.where(table.is_held, KEPT_LATE_FROM, LATE_FROM)
    band[is_gang & (band == LONGER) & (table.queued_s > late_s)] = LATE
    overdue_s = min(others_s, fair_s) * np.where(table.is_held, KEPT_OVERDUE_FROM, 1.0)
    band[is_gang & (table.queued_s > np.maximum(PATIENCE_S, overdue_s))] = OVERDUE
    band[table.attained_gpu_s < NEW_GPU_S] = NEW
    band[table.is_urgent] = URGENT
    return np.asarray(band)


def fair_wait_s(table: QueueTable) -> float:
    """Returns the wait in seconds that a first-come-first-served queue would have.

    The GPUs that jobs hold now are assigned to all jobs in the order of submission. The wait is the age of the
    oldest job for which they do not suffice.
    """
    first = np.argsort(table.submitted_s, kind="stable")
    is_behind = np.cumsum(table.gpus[first]) > table.gpus[table.is_held].sum()
    return float(table.age_s[first][is_behind].max(initial=0.0))
