"""Runs one generation of ranks: starts `train` on the workers, watches the workers and the lease, and returns how the
generation ended.

Every wait is bounded. A hung rank is one that does not answer, or does not join a collective in which its peers wait.
It is reported with its host and stack, and its process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from raytide.actors.gang.lease_watch import LeaseWatch
from raytide.actors.gang.member_actor import first_line
from raytide.actors.trainer.elastic.stragglers import RankTimes
from raytide.actors.trainer.elastic.worker_group import WorkerGroup, WorkerHandle
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import RankAssignment, StepResult, StopRequest, WorkerExit, WorkerStatus
from raytide.core.errors import RaytideError, TrainError
from raytide.core.objects.gang import MemberState
from raytide.core.specs.train import TrainSpec

if TYPE_CHECKING:
    from raytide.core.objects.gang import Lease

TICK_S = 0.1
POLL_EVERY_S = 0.25
OPEN_TIMEOUT_S = 30.0
OUTSIDE_POLLS = 3
"""A rank counts as hung if this many consecutive polls after a collective timeout find it outside of collectives."""
SETTLE_S = 10.0
"""The seconds after the collectives' timeout at which a rank that has not ended counts as hung."""
SAVE_MARGIN = 2.0
"""A notice must be this many times longer than a checkpoint: storage may be slower while all gangs leave at once."""

Kind = Literal["done", "paused", "broken", "oom", "failed"]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    kind: Kind
    why: str = ""
    error: RaytideError | None = None
    began_s: float = 0.0
    """Monotonic time of the first sign of the end."""
    leave_s: float = 0.0
    """Time that the slowest survivor took to leave."""
    dead: tuple[WorkerHandle, ...] = ()
    """Workers whose process died."""


@dataclass(slots=True)
class LastHeartbeat:
    """The last status of a rank, and the number of consecutive polls that found the rank outside of collectives after a
    collective had timed out.
    """

    status: WorkerStatus = field(default_factory=lambda: WorkerStatus(-1, "starting", 0.0))
    polls_outside: int = 0
    """Consecutive polls since the first collective timeout in which the rank was outside of collectives."""

    @property
    def phase(self) -> str:
        return f"{self.status.phase} for {self.status.phase_s:.1f} s"


class HeartbeatMonitor:
    """Polls every rank, with at most one call in flight per rank. Measures for how long a rank has not answered."""

    def __init__(self, workers: list[WorkerHandle]) -> None:
        self._workers = workers
        self._every_s = max(POLL_EVERY_S, 0.005 * len(workers))  # a large gang is polled less often
        self._pending: dict[int, tuple[Future[WorkerStatus], float]] = {}
        self._next_s = dict.fromkeys(range(len(workers)), 0.0)
        self._last = {rank: LastHeartbeat() for rank in range(len(workers))}
        self._timed_out_at_s: float | None = None

    def poll(self, ranks: Iterable[int]) -> list[tuple[int, WorkerStatus]]:
        """Returns the ranks whose status has arrived since the last call, each with its status. Also starts a new poll
        of each rank in `ranks` whose next poll is due.
        """
        now = time.monotonic()
        for rank in ranks:
            if rank not in self._pending and now >= self._next_s[rank]:
                self._pending[rank] = self._workers[rank].call("poll"), now
        found = []
        for rank, (answer, polled_s) in list(self._pending.items()):
            if answer.done():
                del self._pending[rank]
                self._next_s[rank] = now + (self._every_s if self._timed_out_at_s is None else 0.0)
                if answer.exception() is None:  # a dead rank's `train` call reports the reason
                    found.append((rank, self._read(rank, answer.result(), polled_s)))
        return found

    def on_collective_timeout(self) -> None:
        """Records that a collective timed out. From now on ranks are polled without delay, to find the ranks that are
        outside of collectives.
        """
        if self._timed_out_at_s is None:
            self._timed_out_at_s = time.monotonic()
            self._next_s = dict.fromkeys(self._next_s, 0.0)

    def silent_s(self, rank: int) -> float:
        """Returns for how many seconds the current poll of the rank has been unanswered. Returns 0.0 if no poll is in
        flight.
        """
        return time.monotonic() - self._pending[rank][1] if rank in self._pending else 0.0

    def last(self, rank: int) -> LastHeartbeat:
        return self._last[rank]

    def _read(self, rank: int, status: WorkerStatus, polled_s: float) -> WorkerStatus:
        heartbeat = self._last[rank]
        heartbeat.status = status
        if self._timed_out_at_s is not None and polled_s >= self._timed_out_at_s:
            heartbeat.polls_outside = (
                0 if status.is_waiting or status.phase in ("leaving", "idle") else heartbeat.polls_outside + 1
            )
        return status


class GenerationRunner:
    def __init__(
        self,
        number: int,
        spec: TrainSpec,
        workers: list[WorkerHandle],
        worker_group: WorkerGroup,
        watch: LeaseWatch,
        record: RunLog,
        *,
        micro_batch: int,
        claim: str = "",
        on_steps: Callable[[list[StepResult], WorkerStatus], None],
    ) -> None:
        self.number, self.spec, self.workers = number, spec, workers
        self.worker_group, self.watch, self.record = worker_group, watch, record
        self.micro_batch, self.claim, self.on_steps = micro_batch, claim, on_steps
        self.rank_times = RankTimes()
        self.save_s = 0.0
        """Duration of the last checkpoint that a rank reported."""
        self._last_step = -1
        self._running: dict[Future[WorkerExit], int] = {}
        self._exits: dict[int, WorkerExit] = {}
        self._dead: dict[int, WorkerHandle] = {}
        self._failed: tuple[str, RaytideError] | None = None
        self._heartbeats = HeartbeatMonitor(workers)
        self._broke_s: float | None = None
        self._end_reason: tuple[float, str] | None = None
        """Monotonic time and reason of the generation's end."""

    def run(self) -> GenerationResult:
        """Trains until the generation ends, and returns how the generation ended."""
        if self._start_ranks():
            while self._running:
                self._collect()
                for rank, status in self._heartbeats.poll(self._running.values()):
                    self._record_status(rank, status)
                self._follow_lease()
                self._find_hung()
                self._find_stalled()
        return self._result()

    def _start_ranks(self) -> bool:
        """Opens the rendezvous store on rank 0 and starts `train` on all ranks."""
        first, world = self.workers[0], len(self.workers)
        store_port = first.call("open_store", first.member.address, world)
        wait([store_port], timeout=OPEN_TIMEOUT_S)
        if not store_port.done() or store_port.exception() is not None:
            why = first_line(store_port.exception()) if store_port.done() else f"no answer in {OPEN_TIMEOUT_S:.0f} s"
            self._kill(0, f"rank 0 on {first.host} did not open the rendezvous store: {why}")
            return False
        store = first.member.address, store_port.result()
        for rank, worker in enumerate(self.workers):
            assignment = RankAssignment(
                self.number, rank, world, store, worker.member.address, self.micro_batch, self.claim
            )
            self._running[worker.call("train", assignment)] = rank
        return True

    def _collect(self) -> None:
        for ended in wait(self._running, TICK_S, FIRST_COMPLETED).done:
            rank = self._running.pop(ended)
            if ended.exception() is not None:
                self._kill(rank, f"rank {rank} on {self.workers[rank].host} died: {first_line(ended.exception())}")
                continue
            worker_exit = self._exits[rank] = ended.result()
            if worker_exit.last_status is not None:
                self._record_status(rank, worker_exit.last_status)
            if worker_exit.kind not in ("done", "paused"):
                self._broke_s = self._broke_s or time.monotonic()
                self._note_end(f"rank {rank} on {self.workers[rank].host}: {worker_exit.detail.splitlines()[-1]}")
            if worker_exit.timed_out:
                self._heartbeats.on_collective_timeout()

    def _follow_lease(self) -> None:
        """Follows the lease: lost members end the generation; members that leave or join cause a planned change."""
        lease = self.watch.latest()
        if lease is None:
            return
        lost = self.worker_group.reconcile(lease)
        self.worker_group.settle(lease, self.workers)
        for rank, worker in enumerate(self.workers):
            if worker in lost:
                self._dead[rank] = worker
                if rank not in self._exits:
                    self._note_end(f"{worker.host} was lost")
        for worker, _, final in self.worker_group.check():
            if final is None:
                self.worker_group.rest(worker)
        if self._end_reason is None and (change := self._planned_change(lease)):
            how, why = change
            self._note_end(why)
            self.workers[0].call("pause", self.number, how)

    def _planned_change(self, lease: Lease) -> tuple[StopRequest, str] | None:
        """Returns how ranks should stop for a planned change of the gang, and why; None if none is needed."""
        leaving = [worker for worker in self.workers if worker.member.state is MemberState.LEAVING]
        if leaving:
            return self._stop_for_notice(leaving), f"{leaving[0].host} leaves soon"
        assigned = [] if self.worker_group.starting else self.worker_group.assign(lease.shape, self.workers)
        if len(assigned) > len(self.workers):
            new = next(worker for worker in assigned if worker not in self.workers)
            return StopRequest.SAVE, f"{new.host} joins"
        return None

    def _stop_for_notice(self, leaving: list[WorkerHandle]) -> StopRequest:
        """Returns SAVE, or STOP if a member leaves too soon for a checkpoint."""
        deadline_s = min(worker.member.leaves_at_s or float("inf") for worker in leaving)
        left_s = deadline_s - self.record.clock.now_s()
        fits = left_s > self.save_s * SAVE_MARGIN
        self.record.event("notice", generation=self.number, left_s=round(left_s, 3), save_s=self.save_s, saves=fits)
        return StopRequest.SAVE if fits else StopRequest.STOP

    def _find_hung(self) -> None:
        """Kills ranks that do not answer, that stay outside of collectives while peers wait, or that still run long
        after their peers have failed.
        """
        end_timeout_s = self.spec.collective_timeout_s + SETTLE_S
        silence_limit_s = self.spec.collective_timeout_s  # a rank waiting in a collective still answers
        for rank in sorted(self._running.values()):
            if self._heartbeats.silent_s(rank) > silence_limit_s:
                self._kill_hung(rank, f"no answer for {silence_limit_s:g} s")
            elif self._heartbeats.last(rank).polls_outside >= OUTSIDE_POLLS:
                self._kill_hung(rank, "its peers waited for it until their collective timed out")
            elif self._broke_s is not None and time.monotonic() - self._broke_s > end_timeout_s:
                self._kill_hung(rank, f"still running {end_timeout_s:g} s after its peers' collective failed")

    def _find_stalled(self) -> None:
        """Fails the run if a rank answers but makes no progress, for example because its storage hangs. Another
        generation would hang as well.
        """
        for rank in sorted(self._running.values()):
            heartbeat = self._heartbeats.last(rank)
            if heartbeat.status.phase_s > self.spec.stall_timeout_s:
                at = f"{heartbeat.phase}, in {heartbeat.status.stack}"
                why = f"rank {rank} on {self.workers[rank].host} makes no progress: {at}"
                error = TrainError(f"{self.spec.name} stalled: {why}.", hint="Fix the cause, or raise stall_timeout_s.")
                self._failed = why, error
                self._kill_hung(rank, f"stall_timeout_s is {self.spec.stall_timeout_s:g} s")

    def _kill_hung(self, rank: int, why: str) -> None:
        host, heartbeat = self.workers[rank].host, self._heartbeats.last(rank)
        what = {"phase": heartbeat.phase, "where": heartbeat.status.stack, "why": why}
        self.record.event("hung", generation=self.number, rank=rank, host=host, **what)
        self._kill(rank, f"rank {rank} on {host} hung in {heartbeat.phase}, in {heartbeat.status.stack}: {why}")
        self._running = {future: other for future, other in self._running.items() if other != rank}

    def _kill(self, rank: int, why: str) -> None:
        self._note_end(why)
        self._broke_s = self._broke_s or time.monotonic()
        self._exits[rank] = WorkerExit("broken", why)
        self._dead[rank] = self.workers[rank]
        self.worker_group.kill(self.workers[rank])

    def _note_end(self, why: str) -> None:
        if self._end_reason is None:
            self._end_reason = (time.monotonic(), why)

    def _record_status(self, rank: int, status: WorkerStatus) -> None:
        """Records a rank's status. All ranks report the same steps, so only the first report of a step counts."""
        if status.generation != self.number:
            return
        self.save_s = status.save_s or self.save_s
        self.rank_times.record(rank, status.steps)
        for why in status.skipped_checkpoints:
            self.record.event("skipped", why=why)
        new_steps = [step for step in status.steps if step.step > self._last_step]
        if new_steps:
            self._last_step = new_steps[-1].step
            for step in new_steps:
                self.record.step(step)
            self.on_steps(new_steps, status)

    def _result(self) -> GenerationResult:
        exits = self._exits.values()
        kinds = {worker_exit.kind for worker_exit in exits}
        began_s, why = self._end_reason or (time.monotonic(), "")
        leave_s = max(
            (o.last_status.phase_times.get("leave", 0.0) for o in exits if o.last_status is not None), default=0.0
        )
        kind: Kind = next((kind for kind in ("done", "oom", "broken") if kind in kinds), "paused")
        error = None
        if self._failed is not None:
            kind, (why, error) = "failed", self._failed
        elif not self._dead and kind != "done":  # an error beside a death may be its consequence
            failed = next((worker_exit for worker_exit in exits if worker_exit.kind == "failed"), None)
            if failed is not None:
                kind, why, error = "failed", failed.detail, failed.error
        return GenerationResult(kind, why, error, began_s, leave_s, tuple(self._dead.values()))
