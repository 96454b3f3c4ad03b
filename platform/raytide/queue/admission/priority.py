"""The order of all jobs, waiting or running: least attained service with corrections.

Plain least attained service starves large gangs and preempts long jobs late. So a gang goes before all but new jobs
once it has waited longer than smaller jobs do, or longer than it would under first come, first served. A job well into
its run is preempted for short jobs only. The few oldest jobs, which are late anyhow, go last. The durations of jobs are
not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NEW_GPU_S, SHORT_GPU_S = 3600.0, 36000.0
"""Attained service up to which a job counts as new, and as short."""
GANG = 8
"""A job with this many GPUs or more counts as a gang, for which room is hard to find."""
PATIENCE_S = 4 * 3600.0
"""A gang that has waited less is not overdue."""
WELL_IN_S = 8 * 3600.0
"""A smaller job that has run for longer counts as short, until it goes last."""
OLD_S = 72 * 3600.0
LAST_SHARE = 0.005
"""A smaller job goes last once it is older than `OLD_S`, and older than all but this share of all jobs ever became."""

URGENT, NEW, OVERDUE, SHORT, LONGER, LAST = range(6)
"""The bands, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class QueueTable:
    """One row for each job that waits for GPUs or holds some."""

    gpus: Floats
    submitted_s: Floats
    attained_gpu_s: Floats
    """Work done, in GPU-seconds."""
    held_s: Floats
    """Time with GPUs, over all its runs."""
    queued_s: Floats
    """Waiting time, over all its waits."""
    priority: Ints
    """The number of its class; higher goes first."""
    share: Floats
    """The recent use of each job's team over its weight; the least goes first within a band."""
    is_held: Bools
    is_preemptible: Bools
    """It holds GPUs and may be preempted."""
    in_cooldown: Bools
    """It was preempted a short while ago, so it preempts no other."""
    is_urgent: Bools
    """It has a deadline and no time to spare."""
    within_nominal_quota: Bools
    """It fits into its team's nominal quota together with the team's jobs before it."""
    aging_cutoff_s: float = 0.0
    """Only `LAST_SHARE` of all jobs, finished ones included, became older."""

    @property
    def age_s(self) -> Floats:
        return self.held_s + self.queued_s


def ranked(table: QueueTable) -> Ints:
    """Returns the row indices in scheduling order."""
    return np.asarray(np.lexsort((table.submitted_s, table.share, bands(table), -table.priority)))


def waiting(table: QueueTable, order: Ints) -> Ints:
    """Returns the waiting rows in scheduling order, those within their team's nominal quota before borrowers.

    Otherwise a borrower would be admitted in one cycle and preempted in the next.
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
    others_s = table.queued_s[~is_gang & ~is_last].max(initial=0.0)
    band[is_gang & (table.queued_s > max(PATIENCE_S, min(others_s, fair_wait_s(table))))] = OVERDUE
    band[table.attained_gpu_s < NEW_GPU_S] = NEW
    band[table.is_urgent] = URGENT
    return np.asarray(band)


def fair_wait_s(table: QueueTable) -> float:
    """Returns the wait under first come, first served: the age of the oldest job that would find no room if all jobs
    before it held their GPUs."""
    first = np.argsort(table.submitted_s, kind="stable")
    is_behind = np.cumsum(table.gpus[first]) > table.gpus[table.is_held].sum()
    return float(table.age_s[first][is_behind].max(initial=0.0))
