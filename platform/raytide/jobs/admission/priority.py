"""The order in which everybody is given room, whether it holds some or waits: least attained service, mended. Pure.

Least attained service starves large gangs, and stops long jobs late. So a gang goes before all but the newest once it
waited longer than the smaller jobs do, or than anybody would if it was first come, first served; a job well into its
run is stopped only for short ones; and the few that are oldest, and late anyhow, give way to all. Nothing is known of
durations.
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
"""GPUs from which a job is a gang, for which room is hard to find."""
PATIENCE_S = 4 * 3600.0
"""No gang is overdue that waited less."""
WELL_IN_S = 8 * 3600.0
"""A smaller job that ran for so long counts as short ..."""
OLD_S = 72 * 3600.0
LAST_SHARE = 0.005
"""... until it is so old, and older than all but this share of jobs ever got; then it gives way to everybody."""
COOL_DOWN_S = 600.0
"""Who was preempted takes only room that is free for so long: it preempts nobody."""
MAX_PREEMPTIONS = 100
"""Who was preempted so often is not preempted again, and counts as one that cannot be."""

URGENT, NEW, OVERDUE, SHORT, LONGER, LAST = range(6)
"""The bands."""


@dataclass(frozen=True, slots=True, eq=False)
class QueueTable:
    """Every job that wants or holds GPUs, a row each."""

    gpus: Floats
    submitted_s: Floats
    attained_gpu_s: Floats
    """Work done, in GPU-seconds."""
    held_s: Floats
    """How long it has held its GPUs, all its runs together."""
    queued_s: Floats
    """How long it has waited, all its waits together."""
    priority: Ints
    """Of its class; a higher number goes first."""
    share: Floats
    """What its team has used of late, by its weight: the least goes first within a band."""
    is_held: Bools
    is_preemptible: Bools
    """It holds GPUs and may be preempted."""
    in_cooldown: Bools
    """It was preempted a short while ago, so it preempts nobody."""
    is_urgent: Bools
    """It has a deadline and no time to lose."""
    within_nominal_quota: Bools
    """It asks for no more than its team's own quota, with those of its team before it in the order."""
    aging_cutoff_s: float = 0.0
    """Only `LAST_SHARE` of all jobs, those that are over included, waited and ran for longer."""

    @property
    def age_s(self) -> Floats:
        return self.held_s + self.queued_s


def ranked(claims: QueueTable) -> Ints:
    """All rows, who goes first first."""
    return np.asarray(np.lexsort((claims.submitted_s, claims.share, bands(claims), -claims.priority)))


def waiting(claims: QueueTable, order: Ints) -> Ints:
    """The rows that are to be seated, who is first first: those who ask for their own before those who would borrow it.

    Otherwise a borrower would be admitted in one pass, and give it back in the next.
    """
    rows = order[~claims.is_held[order]]
    return rows[np.argsort(~claims.within_nominal_quota[rows], kind="stable")]


def bands(claims: QueueTable) -> Ints:
    is_gang = claims.gpus >= GANG
    is_last = ~is_gang & (claims.age_s > max(OLD_S, claims.aging_cutoff_s))
    band = np.where(claims.attained_gpu_s < SHORT_GPU_S, SHORT, LONGER)
    band[~is_gang & (claims.held_s > WELL_IN_S)] = SHORT
    band[is_last] = LAST
    # Where the queue is long, everybody waits long: a gang is overdue when it waits longer than the others.
    others_s = claims.queued_s[~is_gang & ~is_last].max(initial=0.0)
    band[is_gang & (claims.queued_s > max(PATIENCE_S, min(others_s, fair_wait_s(claims))))] = OVERDUE
    band[claims.attained_gpu_s < NEW_GPU_S] = NEW
    band[claims.is_urgent] = URGENT
    return np.asarray(band)


def fair_wait_s(claims: QueueTable) -> float:
    """How long one waits where it is first come, first served: so old is the first job that those before it, if they
    all held their GPUs, would leave no room."""
    first = np.argsort(claims.submitted_s, kind="stable")
    is_behind = np.cumsum(claims.gpus[first]) > claims.gpus[claims.is_held].sum()
    return float(claims.age_s[first][is_behind].max(initial=0.0))
