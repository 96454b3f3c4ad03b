"""Baseline queue policies: FIFO, EASY, DRF, LAS and SRPT. EASY and SRPT know the durations of jobs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raytide.simulate.jobs.cluster import Ints, JobQueue, QueuePolicy

LAS_LIMITS_GPU_S = np.array([3600.0, 36000.0])


def fifo(queue: JobQueue) -> Ints:
    """Returns the jobs that should run. Jobs start in the order of their submission: no job overtakes the first job
    that must wait.
    """
    waiting = queue.waiting
    fit = int(np.searchsorted(np.cumsum(queue.gpus[waiting]), queue.free, side="right"))
    return np.concatenate((queue.running, waiting[:fit]))


def easy(queue: JobQueue) -> Ints:
    """Returns the jobs to run under EASY backfilling, with exactly known durations.

    A job is backfilled if it ends before the first waiting job can start, or if it leaves enough GPUs for that job.
    """
    started = fifo(queue)
    waiting = queue.waiting[len(started) - len(queue.running) :]
    free = queue.gpus_total - int(queue.gpus[started].sum())
    if not free or len(waiting) < 2:
        return started
    ends_s = queue.left_s[started]
    by_end = np.argsort(ends_s, kind="stable")
    freed = free + np.cumsum(queue.gpus[started][by_end])
    at = int(np.searchsorted(freed, queue.gpus[waiting[0]]))
    shadow_s = float(ends_s[by_end[at]])
    last = int(np.searchsorted(ends_s[by_end], shadow_s, side="right")) - 1
    extra = int(freed[last] - queue.gpus[waiting[0]])
    behind = waiting[1:]
    behind = behind[(queue.gpus[behind] <= free)]
    behind = behind[(queue.left_s[behind] <= shadow_s) | (queue.gpus[behind] <= extra)]
    return np.concatenate((started, _backfilled(queue, behind, free, extra, shadow_s)))


def _backfilled(queue: JobQueue, behind: Ints, free: int, extra: int, shadow_s: float) -> Ints:
    taken: list[int] = []
    for job in behind:
        size = int(queue.gpus[job])
        is_short = queue.left_s[job] <= shadow_s
        if size > free or not (is_short or size <= extra):
            continue
        taken.append(int(job))
        free -= size
        extra -= 0 if is_short else size
        if not free:
            break
    return np.array(taken, dtype=np.int64)


def drf(queue: JobQueue) -> Ints:
    """Returns the jobs to run. Repeatedly selects the team that holds the fewest GPUs, and takes that team's oldest
    waiting job.
    """
    waiting, free = queue.waiting, queue.free
    if not free or not len(waiting):
        return queue.running
    held = np.bincount(queue.team[queue.running], weights=queue.gpus[queue.running], minlength=queue.team.max() + 1)
    heads = {int(team): iter(waiting[queue.team[waiting] == team]) for team in np.unique(queue.team[waiting])}
    first = {team: next(jobs) for team, jobs in heads.items()}
    taken: list[int] = []
    while free and first:
        team = min(first, key=lambda team: (held[team], team))
        job = first.pop(team)
        size = int(queue.gpus[job])
        if size > free:
            continue  # the team waits for its head
        taken.append(int(job))
        held[team] += size
        free -= size
        if (after := next(heads[team], None)) is not None:
            first[team] = after
    return np.concatenate((queue.running, np.array(taken, dtype=np.int64)))


def las(queue: JobQueue) -> Ints:
    """Returns the jobs to run, least attained service first (NSDI'19). There are three bands of attained service.
    Within a band, jobs run first come, first served.
    """
    band = np.searchsorted(LAS_LIMITS_GPU_S, queue.attained_gpu_s[queue.active], side="right")
    return _filled(queue, queue.active[np.argsort(band, kind="stable")])


def srpt(queue: JobQueue) -> Ints:
    """Returns the jobs to run, least remaining GPU-time first."""
    left = queue.left_s[queue.active] * queue.gpus[queue.active]
    return _filled(queue, queue.active[np.argsort(left, kind="stable")])


def _filled(queue: JobQueue, order: Ints) -> Ints:
    """Returns the jobs that get GPUs in this order; each job gets all of its GPUs or none."""
    free, rest, taken = queue.gpus_total, order, [order[:0]]
    while free and len(rest := rest[queue.gpus[rest] <= free]):
        sums = np.cumsum(queue.gpus[rest])
        fit = int(np.searchsorted(sums, free, side="right"))
        taken.append(rest[:fit])
        free -= int(sums[fit - 1])
        rest = rest[fit + 1 :]
    return np.concatenate(taken)


def next_band_s(queue: JobQueue, limits_gpu_s: Iterable[float] = tuple(LAS_LIMITS_GPU_S)) -> float:
    """Returns the next time in seconds at which a running job's attained service passes the limit of a band."""
    running = queue.running
    found = np.inf
    for limit in limits_gpu_s:
        below = running[queue.attained_gpu_s[running] < limit]
        if len(below):
            found = min(found, float(((limit - queue.attained_gpu_s[below]) / queue.gpus[below]).min()))
    return queue.now_s + found


BASELINES = {
    "fifo": QueuePolicy(fifo),
    "easy": QueuePolicy(easy),
    "drf": QueuePolicy(drf),
    "las": QueuePolicy(las, preempts=True, wake_s=next_band_s),
    "srpt": QueuePolicy(srpt, preempts=True),
}
