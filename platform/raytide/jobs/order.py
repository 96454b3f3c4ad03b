"""Who should hold the GPUs now: least attained service first, with three rules against its faults. Pure.

Least attained service starves large gangs, and stops long jobs late. So a gang that waited longer than the smaller jobs
do goes before all but the newest; a job well into its run is stopped only for short ones; and one that has had days
gives way to all. Nothing is known of durations. The live queue does not use this yet: see `admit`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEW_GPU_S, SHORT_GPU_S = 3600.0, 36000.0
"""Attained service up to which a job counts as new, and as short."""
GANG = 8
"""GPUs from which a job is a gang, for which room is hard to find."""
PATIENCE_S = 4 * 3600.0
"""No gang is overdue that waited less."""
WELL_IN_S = 12 * 3600.0
"""A smaller job that ran for so long counts as short ..."""
LONG_S = 72 * 3600.0
"""... until it ran for so long; then it gives way to everybody."""

NEW, OVERDUE, SHORT, LONGER, LAST = range(5)
"""The bands, first come, first served within each."""


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """Every job that wants or holds GPUs, a row each."""

    gpus: Ints
    submitted_s: Floats
    attained_gpu_s: Floats
    """Work done, in GPU-seconds."""
    held_s: Floats
    """How long it has held its GPUs, all its runs together."""
    queued_s: Floats
    """How long it has waited, all its waits together."""


def holders(claims: Claims, gpus_total: int) -> Ints:
    """The rows that should hold their GPUs now. Those that hold some and are not among them are to be preempted."""
    order = np.lexsort((claims.submitted_s, bands(claims)))
    return fill(order, claims.gpus, gpus_total)


def bands(claims: Claims) -> Ints:
    is_gang = claims.gpus >= GANG
    is_last = ~is_gang & (claims.held_s > LONG_S)
    band = np.where(claims.attained_gpu_s < SHORT_GPU_S, SHORT, LONGER)
    band[~is_gang & (claims.held_s > WELL_IN_S)] = SHORT
    band[is_last] = LAST
    # Where the queue is long, everybody waits long: a gang is overdue when it waits longer than the others.
    others_s = claims.queued_s[~is_gang & ~is_last]
    band[is_gang & (claims.queued_s > others_s.max(initial=PATIENCE_S))] = OVERDUE
    band[claims.attained_gpu_s < NEW_GPU_S] = NEW
    return np.asarray(band)


def fill(order: Ints, gpus: Ints, gpus_total: int) -> Ints:
    """Give GPUs away in this order, to each row all it needs or nothing."""
    free, rest, taken = gpus_total, order, [order[:0]]
    while free and len(rest := rest[gpus[rest] <= free]):
        sums = np.cumsum(gpus[rest])
        fit = int(np.searchsorted(sums, free, side="right"))
        taken.append(rest[:fit])
        free -= int(sums[fit - 1])
        rest = rest[fit + 1 :]
    return np.concatenate(taken)
