"""raytide's queue in the simulator: the production scheduling cycle with a capacity that only counts GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raytide.queue.admission.cycle import Victims, run_cycle
from raytide.queue.admission.priority import (
    LAST_SHARE,
    NEW_GPU_S,
    OLD_S,
    SHORT_GPU_S,
    Bools,
    Floats,
    QueueTable,
    ranked,
)
from raytide.queue.lifecycle.attained_service import COOL_DOWN_S, MAX_PREEMPTIONS
from raytide.simulate.jobs.baselines import next_band_s
from raytide.simulate.jobs.cluster import Ints, JobQueue, QueuePolicy


def pick(queue: JobQueue) -> Ints:
    active = queue.active
    claims = _claims(queue)
    floor = GpuCapacity.of(claims, queue.gpus_total)
    run_cycle(claims, floor)
    return active[floor.holds]


@dataclass(slots=True, eq=False)
class GpuCapacity:
    """A `Capacity` for the scheduling cycle. It counts only GPUs and does not distinguish nodes."""

    gpus: Floats
    holds: Bools
    free: float
    order: Ints
    is_preemptible: Bools
    preempts: Bools
    need: Floats
    """The free GPUs that each row needs in addition to those of preemptible lower rows, if it may preempt."""

    @classmethod
    def of(cls, claims: QueueTable, gpus_total: int) -> GpuCapacity:
        holds, free = claims.is_held.copy(), gpus_total - float(claims.gpus[claims.is_held].sum())
        need = np.empty(len(holds))
        floor = cls(claims.gpus, holds, free, ranked(claims), claims.is_preemptible, ~claims.in_cooldown, need)
        floor._look_below()
        return floor

    def first(self, waiting: Ints) -> int | None:
        """Returns the index in `waiting` of the first row that can get its GPUs. Returns None if there is no such row.

        A row can get its GPUs if enough GPUs are free. If the row may preempt, the GPUs of preemptible rows that
        come later in the order also count as free.
        """
        able = self.need[waiting] <= self.free
        return int(able.argmax()) if able.any() else None

    def _look_below(self) -> None:
        yielded = np.where(self.holds & self.is_preemptible, self.gpus, 0.0)[self.order][::-1].cumsum()[::-1]
        self.need[self.order] = self.gpus[self.order] - yielded * self.preempts[self.order]

    def admit(self, row: int) -> bool:
        if self.gpus[row] > self.free:
            return False
        self.holds[row] = True
        self.free -= self.gpus[row]
        return True

    def preempt(self, row: int, victims: Victims) -> Sequence[int]:
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
        self._look_below()
        return gone


def _claims(queue: JobQueue) -> QueueTable:
    active = queue.active
    is_held = queue.is_running[active]
    return QueueTable(
        gpus=queue.gpus[active].astype(np.float64),
        submitted_s=queue.submit_s[active],
        attained_gpu_s=queue.attained_gpu_s[active],
        held_s=queue.held_s[active],
        queued_s=queue.now_s - queue.submit_s[active] - queue.held_s[active],
        priority=np.zeros(len(active), dtype=np.int64),
        share=np.zeros(len(active)),
        is_held=is_held,
        is_preemptible=is_held & (queue.preemptions[active] < MAX_PREEMPTIONS),
        in_cooldown=queue.now_s - queue.preempted_s[active] < COOL_DOWN_S,
        is_urgent=np.zeros(len(active), dtype=bool),
        within_nominal_quota=np.zeros(len(active), dtype=bool),
        aging_cutoff_s=_old_s(queue),
    )


def _old_s(queue: JobQueue) -> float:
    """Returns the ageing cutoff in seconds over all jobs submitted so far. A cutoff of at most `OLD_S` has no effect
    and is returned as 0.
    """
    until = queue.active.max(initial=-1) + 1
    end_s = queue.end_s[:until]
    age_s = np.where(end_s > 0, end_s, queue.now_s) - queue.submit_s[:until]
    older = age_s[age_s > OLD_S]
    most = int(LAST_SHARE * until)
    return float(np.partition(older, len(older) - 1 - most)[len(older) - 1 - most]) if most < len(older) else 0.0


RAYTIDE = QueuePolicy(pick, preempts=True, wake_s=lambda queue: next_band_s(queue, (NEW_GPU_S, SHORT_GPU_S)))
