"""raytide's queue in the simulator: the production pass over a floor that counts GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytide.jobs.order import (
    COOL_DOWN_S,
    LAST_SHARE,
    MAX_PREEMPTIONS,
    NEW_GPU_S,
    SHORT_GPU_S,
    Bools,
    Claims,
    Floats,
    ranked,
)
from raytide.jobs.turn import Victims, turn
from raytide.simulate.cluster_jobs import Ints, Policy, Queue
from raytide.simulate.job_baselines import next_band_s


def pick(queue: Queue) -> Ints:
    active = queue.active
    claims = _claims(queue)
    floor = Counted.of(claims, queue.gpus_total)
    turn(claims, floor)
    return active[floor.holds]


@dataclass(slots=True, eq=False)
class Counted:
    gpus: Floats
    holds: Bools
    free: float
    rank: Ints
    gives_way: Bools
    preempts: Bools

    @classmethod
    def of(cls, claims: Claims, gpus_total: int) -> Counted:
        order = ranked(claims)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        free = gpus_total - float(claims.gpus[claims.is_held].sum())
        return cls(claims.gpus, claims.is_held.copy(), free, rank, claims.gives_way, ~claims.is_cooling)

    def first(self, waiting: Ints) -> int | None:
        """Whose GPUs are free or held by lower ones."""
        lower = np.flatnonzero(self.holds & self.gives_way)
        lower = lower[np.argsort(self.rank[lower])]
        held = np.append(np.cumsum(self.gpus[lower][::-1])[::-1], 0.0)
        below = held[np.searchsorted(self.rank[lower], self.rank[waiting])]
        able = np.flatnonzero(self.gpus[waiting] <= self.free + below * self.preempts[waiting])
        return int(able[0]) if len(able) else None

    def seat(self, row: int) -> bool:
        if self.gpus[row] > self.free:
            return False
        self.holds[row] = True
        self.free -= self.gpus[row]
        return True

    def clear(self, row: int, victims: Victims) -> Sequence[int]:
        lower = victims()
        freed = self.free + np.cumsum(self.gpus[lower])
        enough = int(np.searchsorted(freed, self.gpus[row]))
        if enough == len(lower):
            return ()
        surplus = float(freed[enough] - self.gpus[row])
        gone = []
        for other in reversed(lower[: enough + 1]):
            if self.gpus[other] <= surplus:
                surplus -= float(self.gpus[other])
            else:
                gone.append(other)
        self.holds[gone] = False
        self.holds[row] = True
        self.free = surplus
        return gone


def _claims(queue: Queue) -> Claims:
    active = queue.active
    is_held = queue.is_running[active]
    return Claims(
        gpus=queue.gpus[active].astype(np.float64),
        submitted_s=queue.submit_s[active],
        attained_gpu_s=queue.attained_gpu_s[active],
        held_s=queue.held_s[active],
        queued_s=queue.now_s - queue.submit_s[active] - queue.held_s[active],
        priority=np.zeros(len(active), dtype=np.int64),
        share=np.zeros(len(active)),
        is_held=is_held,
        gives_way=is_held & (queue.preemptions[active] < MAX_PREEMPTIONS),
        is_cooling=queue.now_s - queue.preempted_s[active] < COOL_DOWN_S,
        is_urgent=np.zeros(len(active), dtype=bool),
        is_own=np.zeros(len(active), dtype=bool),
        long_s=_long_s(queue),
    )


def _long_s(queue: Queue) -> float:
    """Of the jobs that were submitted so far."""
    held_s = queue.held_s[: queue.active.max(initial=-1) + 1]
    if not len(held_s):
        return 0.0
    place = len(held_s) - 1 - int(LAST_SHARE * len(held_s))
    return float(np.partition(held_s, place)[place])


RAYTIDE = Policy(pick, preempts=True, wake_s=lambda queue: next_band_s(queue, (NEW_GPU_S, SHORT_GPU_S)))
