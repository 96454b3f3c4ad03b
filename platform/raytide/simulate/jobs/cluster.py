"""An event simulation of recorded jobs on a number of GPUs, under a queue policy.

GPUs are counted, not placed on nodes. A job holds all of its GPUs or none. A preempted job keeps its completed work.
When it restarts, it holds its GPUs for `RESTART_S` before it continues.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytide.simulate.jobs.trace import DAY_S, JobTrace

RESTART_S = 60.0
QUANTUM_S = 60.0
"""The seconds at whose whole multiples a preempting policy decides."""
GANG = 8
"""The number of GPUs from which a job counts for the longest wait."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True, eq=False)
class JobQueue:
    """The jobs as a queue policy sees them. Each column is one array with a value for every job of the trace. `active`
    holds the indices of the jobs that were submitted and are not done.
    """

    now_s: float
    gpus_total: int
    active: Ints
    """The indices of unfinished jobs, in order of submission."""
    gpus: Ints
    team: Ints
    submit_s: Floats
    attained_gpu_s: Floats
    """The attained service: work done multiplied by GPUs."""
    left_s: Floats
    """Remaining run time; only clairvoyant policies use it."""
    held_s: Floats
    """The time for which the job has held its GPUs."""
    end_s: Floats
    """The end time; 0 until then."""
    is_running: NDArray[np.bool_]
    preempted_s: Floats
    """The time of its last preemption; minus infinity without one."""
    preemptions: Ints

    @property
    def running(self) -> Ints:
        return self.active[self.is_running[self.active]]

    @property
    def waiting(self) -> Ints:
        return self.active[~self.is_running[self.active]]

    @property
    def free(self) -> int:
        return self.gpus_total - int(self.gpus[self.running].sum())


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    pick: Callable[[JobQueue], Ints]
    """A function that returns the jobs that hold GPUs from now on; running jobs that it does not return are
    preempted."""
    preempts: bool = False
    wake_s: Callable[[JobQueue], float] | None = None
    """A function that returns the next time at which the order changes without an arrival or an end."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    gpus: int
    mean_jct_s: float
    p99_jct_s: float
    makespan_s: float
    utilisation: float
    """The GPU-seconds held divided by the existing ones, in the window."""
    lower_bound_mean_jct_s: float
    max_wait_s: float
    """The longest total wait of a job with 8 or more GPUs."""
    restarts: int


def replay(trace: JobTrace, gpus: int, policy: QueuePolicy, days: int) -> ReplayResult:
    """Simulates a trace under a policy until the last job is done, and returns the result."""
    state = _State.of(trace, gpus)
    while state.arrived < len(trace) or len(state.queue.active):
        state.advance(policy, days * DAY_S)
        state.apply(policy.pick(state.queue))
    jct_s = state.queue.end_s - trace.submit_s
    waits_s = (jct_s - state.queue.held_s)[trace.gpus >= GANG]
    return ReplayResult(
        gpus=gpus,
        mean_jct_s=float(jct_s.mean()),
        p99_jct_s=float(np.percentile(jct_s, 99)),
        makespan_s=float(state.queue.end_s.max()),
        utilisation=state.held_gpu_s / (gpus * days * DAY_S),
        lower_bound_mean_jct_s=lower_bound_s(trace, gpus),
        max_wait_s=float(waits_s.max()) if len(waits_s) else 0.0,
        restarts=state.restarts,
    )


def lower_bound_s(trace: JobTrace, gpus: int) -> float:
    """Returns a lower bound of the mean job completion time in seconds.

    Computes the mean for two ideal cases and returns the larger mean. In the first case, every job runs alone. In
    the second case, one machine with the cluster's total speed runs all jobs by shortest remaining processing time
    (SRPT).
    """
    work_s = trace.duration_s * trace.gpus / gpus
    heap: list[float] = []
    now_s = total_s = 0.0
    arrivals = [*zip(trace.submit_s.tolist(), work_s.tolist(), strict=True), (math.inf, 0.0)]
    for submit_s, work in arrivals:
        while heap and now_s + heap[0] <= submit_s:
            now_s += heapq.heappop(heap)
            total_s += now_s
        if heap:
            heapq.heapreplace(heap, heap[0] - (submit_s - now_s))
        now_s = submit_s
        heapq.heappush(heap, work)
    srpt_s = (total_s - float(trace.submit_s.sum())) / len(trace)
    return max(float(trace.duration_s.mean()), srpt_s)


@dataclass(slots=True, eq=False)
class _State:
    trace: JobTrace
    queue: JobQueue
    overhead_s: Floats
    """The remaining restart time of running jobs."""
    arrived: int = 0
    restarts: int = 0
    held_gpu_s: float = 0.0
    """The GPU-seconds held in the window."""

    @classmethod
    def of(cls, trace: JobTrace, gpus: int) -> _State:
        zeros = np.zeros(len(trace))
        queue = JobQueue(
            now_s=-QUANTUM_S,  # before the first arrival
            gpus_total=gpus,
            active=np.empty(0, dtype=np.int64),
            gpus=trace.gpus,
            team=trace.team,
            submit_s=trace.submit_s,
            attained_gpu_s=zeros.copy(),
            left_s=trace.duration_s.copy(),
            held_s=zeros.copy(),
            end_s=zeros.copy(),
            is_running=np.zeros(len(trace), dtype=bool),
            preempted_s=np.full(len(trace), -np.inf),
            preemptions=np.zeros(len(trace), dtype=np.int64),
        )
        return cls(trace, queue, zeros.copy())

    def advance(self, policy: QueuePolicy, window_s: float) -> None:
        """Advances to the next event."""
        queue = self.queue
        running = queue.running
        ends_in_s = self.overhead_s[running] + queue.left_s[running]
        next_s = self.trace.submit_s[self.arrived] if self.arrived < len(self.trace) else math.inf
        if len(running):
            next_s = min(next_s, queue.now_s + ends_in_s.min())
        if policy.wake_s is not None and len(running) < len(queue.active):
            next_s = min(next_s, policy.wake_s(queue))
        if policy.preempts:
            next_s = max(QUANTUM_S * math.ceil(next_s / QUANTUM_S), queue.now_s + QUANTUM_S)
        self._run(running, ends_in_s, next_s, window_s)
        until = int(np.searchsorted(self.trace.submit_s, next_s, side="right"))
        alive = queue.active[queue.end_s[queue.active] == 0]
        queue.active = np.concatenate((alive, np.arange(self.arrived, until)))
        self.arrived, queue.now_s = until, next_s

    def apply(self, picked: Ints) -> None:
        queue = self.queue
        if queue.gpus[picked].sum() > queue.gpus_total:
            raise ValueError("the policy gave away more GPUs than there are")
        holds = np.zeros(len(self.trace), dtype=bool)
        holds[picked] = True
        again = picked[~queue.is_running[picked] & (queue.held_s[picked] > 0)]
        self.overhead_s[again] = RESTART_S
        self.restarts += len(again)
        preempted = queue.running[~holds[queue.running]]
        queue.preempted_s[preempted] = queue.now_s
        queue.preemptions[preempted] += 1
        queue.is_running[queue.active] = holds[queue.active]

    def _run(self, running: Ints, ends_in_s: Floats, next_s: float, window_s: float) -> None:
        queue = self.queue
        passed_s = np.minimum(ends_in_s, next_s - queue.now_s)
        starting_s = np.minimum(self.overhead_s[running], passed_s)
        self.overhead_s[running] -= starting_s
        queue.left_s[running] -= passed_s - starting_s
        queue.attained_gpu_s[running] += (passed_s - starting_s) * queue.gpus[running]
        queue.held_s[running] += passed_s
        in_window_s = np.minimum(passed_s, max(0.0, window_s - queue.now_s))
        self.held_gpu_s += float(in_window_s @ queue.gpus[running])
        is_done = ends_in_s <= next_s - queue.now_s + 1e-6  # else rounding could stop the clock
        done = running[is_done]
        queue.end_s[done] = queue.now_s + ends_in_s[is_done]
        queue.is_running[done] = False
