"""One generation of ranks: assignment the workers, watch them and the lease, and say how it ended.

Every wait has a bound. A rank that does not answer, or is elsewhere while its peers wait for it, is named with its host
and the code it is in, and its process ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raytide.actors.gang.lease_watch import LeaseWatch
from raytide.actors.trainer.elastic.heartbeat import HeartbeatMonitor
from raytide.actors.trainer.elastic.worker_group import WorkerGroup, WorkerHandle, failure_reason
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import RankAssignment, StepResult, StopRequest, WorkerExit, WorkerStatus
from raytide.core.errors import RaytideError, TrainError
from raytide.core.objects.gang import MemberState
from raytide.core.specs.train import TrainSpec

if TYPE_CHECKING:
    from raytide.core.objects.gang import Lease

TICK_S = 0.1
OPEN_TIMEOUT_S = 30.0
OUTSIDE_POLLS = 3
"""Answers in a row, after a peer's collective timed out, that find a rank anywhere but in a collective."""
SETTLE_S = 10.0
"""Beyond the collectives' own timeout, before a rank that has not ended like its peers is taken for hung."""
SAVE_MARGIN = 2.0
"""A checkpoint must fit into a notice so many times over: the disk may be slower with all gangs leaving at once."""

Kind = Literal["done", "paused", "broken", "oom", "failed"]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    kind: Kind
    why: str = ""
    error: RaytideError | None = None
    began_s: float = 0.0
    """Monotonic: the first sign of it."""
    leave_s: float = 0.0
    """Of the slowest survivor."""
    dead: tuple[WorkerHandle, ...] = ()
    """Those whose process did not survive it."""


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
        self.save_s = 0.0
        """Of the last checkpoint that a rank told of."""
        self._last_step = -1
        self._running: dict[Future[WorkerExit], int] = {}
        self._exits: dict[int, WorkerExit] = {}
        self._dead: dict[int, WorkerHandle] = {}
        self._failed: tuple[str, RaytideError] | None = None
        self._heartbeats = HeartbeatMonitor(workers)
        self._broke_s: float | None = None
        self._first_failure: tuple[float, str] | None = None
        """When and why this generation began to end."""

    def run(self) -> GenerationResult:
        """Train to the generation's end."""
        if self._start_ranks():
            while self._running:
                self._collect()
                for status in self._heartbeats.poll(self._running.values()):
                    self._record_status(status)
                self._follow_lease()
                self._find_hung()
                self._find_stalled()
        return self._result()

    def _start_ranks(self) -> bool:
        """Have rank 0 open the meeting place and start `train` everywhere."""
        first, world = self.workers[0], len(self.workers)
        opened = first.call("open_store", first.member.address, world)
        wait([opened], timeout=OPEN_TIMEOUT_S)
        if not opened.done() or opened.exception() is not None:
            why = failure_reason(opened) if opened.done() else f"no answer in {OPEN_TIMEOUT_S:.0f} s"
            self._kill(0, f"rank 0 on {first.host} did not open the gang's store: {why}")
            return False
        store = first.member.address, opened.result()
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
                self._kill(rank, f"rank {rank} on {self.workers[rank].host} died: {failure_reason(ended)}")
                continue
            outcome = self._exits[rank] = ended.result()
            if outcome.last_status is not None:
                self._record_status(outcome.last_status)
            if outcome.kind not in ("done", "paused"):
                self._broke_s = self._broke_s or time.monotonic()
                self._note_end(f"rank {rank} on {self.workers[rank].host}: {outcome.detail.splitlines()[-1]}")
            if outcome.timed_out:
                self._heartbeats.on_collective_timeout()

    def _follow_lease(self) -> None:
        """React to what happens to members: lost ones are gone, leaving and new ones ask for a planned change."""
        lease = self.watch.latest()
        if lease is None:
            return
        lost = self.worker_group.reconcile(lease)
        self.worker_group.settle(lease, self.workers)
        for rank, worker in enumerate(self.workers):
            if worker in lost and rank not in self._exits:
                self._note_end(f"{worker.host} was lost")
        self.worker_group.check()
        if self._first_failure is None and (change := self._planned_change(lease)):
            how, why = change
            self._note_end(why)
            self.workers[0].call("pause", self.number, how)

    def _planned_change(self, lease: Lease) -> tuple[StopRequest, str] | None:
        """Why to form again on purpose, if there is a reason, and how to stop for it."""
        leaving = [worker for worker in self.workers if worker.member.state is MemberState.LEAVING]
        if leaving:
            return self._stop_for_notice(leaving), f"{leaving[0].host} leaves soon"
        if self.worker_group.starting == 0 and len(seats := self.worker_group.assign(lease.shape, self.workers)) > len(
            self.workers
        ):
            new = next(worker for worker in seats if worker not in self.workers)
            return StopRequest.SAVE, f"{new.host} joins"
        return None

    def _stop_for_notice(self, leaving: list[WorkerHandle]) -> StopRequest:
        """With a checkpoint, unless the notice is too short for what the last one took."""
        deadline_s = min(worker.member.leaves_at_s or float("inf") for worker in leaving)
        left_s = deadline_s - self.record.clock.now_s()
        fits = left_s > self.save_s * SAVE_MARGIN
        self.record.event("notice", generation=self.number, left_s=round(left_s, 3), save_s=self.save_s, saves=fits)
        return StopRequest.SAVE if fits else StopRequest.STOP

    def _find_hung(self) -> None:
        """Name the ranks that do not answer, that are elsewhere while their peers wait, or do not end like them."""
        patience_s = self.spec.collective_timeout_s + SETTLE_S
        silence_s = self.spec.collective_timeout_s  # a rank that waits in a collective still answers
        for rank in sorted(self._running.values()):
            if self._heartbeats.silent_s(rank) > silence_s:
                self._kill_hung(rank, f"it has not answered for {silence_s:g} s")
            elif self._heartbeats.last(rank).polls_outside >= OUTSIDE_POLLS:
                self._kill_hung(rank, "its peers waited for it until their collective timed out")
            elif self._broke_s is not None and time.monotonic() - self._broke_s > patience_s:
                self._kill_hung(rank, f"{patience_s:g} s after its peers' collective failed it has not ended")

    def _find_stalled(self) -> None:
        """A rank that answers and gets nowhere (its storage hangs, say) would do no better in another generation."""
        for rank in sorted(self._running.values()):
            heard = self._heartbeats.last(rank)
            if heard.status.phase_s > self.spec.stall_timeout_s:
                why = f"rank {rank} on {self.workers[rank].host} gets nowhere: {heard.phase}, in {heard.status.stack}"
                error = TrainError(f"{self.spec.name} stalled: {why}.", hint="Mend that, or raise stall_timeout_s.")
                self._failed = why, error
                self._kill_hung(rank, f"stall_timeout_s is {self.spec.stall_timeout_s:g} s")

    def _kill_hung(self, rank: int, why: str) -> None:
        host, heard = self.workers[rank].host, self._heartbeats.last(rank)
        what = {"phase": heard.phase, "where": heard.status.stack, "why": why}
        self.record.event("hung", generation=self.number, rank=rank, host=host, **what)
        self._kill(rank, f"rank {rank} on {host} hung in {heard.phase}, in {heard.status.stack}: {why}")
        self._running = {future: other for future, other in self._running.items() if other != rank}

    def _kill(self, rank: int, why: str) -> None:
        self._note_end(why)
        self._broke_s = self._broke_s or time.monotonic()
        self._exits[rank] = WorkerExit("broken", why)
        self._dead[rank] = self.workers[rank]
        self.worker_group.kill(self.workers[rank])

    def _note_end(self, why: str) -> None:
        if self._first_failure is None:
            self._first_failure = (time.monotonic(), why)

    def _record_status(self, status: WorkerStatus) -> None:
        """Every rank tells of the same steps; the first to do so is believed."""
        if status.generation != self.number:
            return
        self.save_s = status.save_s or self.save_s
        for why in status.skipped_checkpoints:
            self.record.event("skipped", why=why)
        new = [step for step in status.steps if step.step > self._last_step]
        if new:
            self._last_step = new[-1].step
            for step in new:
                self.record.step(step)
            self.on_steps(new, status)

    def _result(self) -> GenerationResult:
        outcomes = self._exits.values()
        kinds = {outcome.kind for outcome in outcomes}
        began_s, why = self._first_failure or (time.monotonic(), "")
        leave_s = max(
            (o.last_status.phase_times.get("leave", 0.0) for o in outcomes if o.last_status is not None), default=0.0
        )
        kind: Kind = next((kind for kind in ("done", "oom", "broken") if kind in kinds), "paused")
        error = None
        if self._failed is not None:
            kind, (why, error) = "failed", self._failed
        elif not self._dead and kind != "done":  # what failed beside a death may have failed of it: it will fail again
            failed = next((outcome for outcome in outcomes if outcome.kind == "failed"), None)
            if failed is not None:
                kind, why, error = "failed", failed.detail, failed.error
        return GenerationResult(kind, why, error, began_s, leave_s, tuple(self._dead.values()))
