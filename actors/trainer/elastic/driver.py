"""Runs a training job over a lease: in its driver process, on the head.

One generation of ranks after another: staff the lease's members with workers, seat those that are ready, train until
something ends it. A break costs the steps since the last snapshot or checkpoint; a planned change costs none.
"""

from __future__ import annotations

import re
import time
from functools import partial

from raytide.actors.gang.lease_watch import LeaseWatch, ProgressReporter
from raytide.actors.trainer.elastic.generation import Generation, GenerationResult
from raytide.actors.trainer.elastic.rank_assignment import most_ranks
from raytide.actors.trainer.elastic.ray_worker import RayWorker, Start
from raytide.actors.trainer.elastic.recovery import Recovery, StepRate
from raytide.actors.trainer.elastic.restart_policy import RestartPolicy
from raytide.actors.trainer.elastic.worker_group import WorkerGroup, WorkerHandle
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import RunResult, StepResult, WorkerStatus, halve_micro_batch
from raytide.core.clock import Clock, SystemClock
from raytide.core.errors import ConflictError, LeaseLostError, RaytideError
from raytide.core.io.claim import Claim
from raytide.core.objects.gang import Lease
from raytide.core.objects.lease_client import LeaseClient
from raytide.core.specs.train import TrainSpec

TICK_S = 0.05


def run_train(
    spec: TrainSpec, lease_client: LeaseClient, job_id: str, *, clock: Clock | None = None, start: Start = RayWorker
) -> RunResult:
    """Train `spec` on the lease of `job_id` to its end, through deaths, notices and returns of its members.

    Needs a process that is connected to Ray, unless `start` makes other workers than Ray's. Goes on from the latest
    checkpoint in `spec.out`. Raises what ended the run early: LeaseLostError, DataError, CheckpointError, StorageError,
    TrainError, or ConflictError when another run writes there.
    """
    claim = Claim(spec.places, job_id, is_over=partial(_is_over, lease_client))
    try:
        return _run(spec, lease_client, job_id, claim, clock or SystemClock(), start)
    finally:
        claim.release()


def _run(
    spec: TrainSpec, lease_client: LeaseClient, job_id: str, claim: Claim, clock: Clock, start: Start
) -> RunResult:
    record = RunLog(spec, clock, logs_steps=False)
    driver = _Driver(spec, lease_client, job_id, record, start, claim)
    try:
        driver.run()
    except ConflictError:  # the files are another run's now
        raise
    except RaytideError as error:
        record.close("failed", str(error))
        raise
    finally:
        driver.close()
    return record.close("done")


def _is_over(client: LeaseClient, holder: str) -> bool:
    """Whether the job that a claim names has ended. A file may name anything."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", holder):
        return False
    try:
        client.lease(holder)
    except LeaseLostError:
        return True
    except RaytideError:  # unknown here, another team's, or the API is away: the heartbeats decide
        return False
    return False


class _Driver:
    def __init__(
        self, spec: TrainSpec, client: LeaseClient, job_id: str, record: RunLog, start: Start, claim: Claim
    ) -> None:
        self.spec, self.record, self.claim = spec, record, claim
        self.crew = WorkerGroup(spec, record, start)
        self.watch = LeaseWatch(client, job_id)
        self.reporter = ProgressReporter(client, job_id)
        self.budget = RestartPolicy(spec.name, best=record.steps)
        self.fits: int | None = None
        """Sequences that a rank may have room for at once, once memory ran out."""
        self.number = 0
        self.hands: list[WorkerHandle] = []
        """Those that were seated last."""
        self.recovery: Recovery | None = None
        """From the end of a generation until the next step."""
        self.pace = StepRate(record.step_s)

    def run(self) -> None:
        while True:
            self.hands = self._wait_for_workers()
            self.number += 1
            self._report_membership()
            if self.recovery is not None:
                self.recovery.seated_s = time.monotonic()
            generation = Generation(
                self.number,
                self.spec,
                self.hands,
                self.crew,
                self.watch,
                self.record,
                micro_batch=self._micro_batch(),
                claim=self.claim.token,
                on_steps=self._stepped,
            )
            ending = generation.run()
            if ending.kind == "done":
                self.record.finished()
                return
            self._handle_exit(ending)

    def close(self) -> None:
        self.watch.close()
        self.crew.close()
        self.reporter.close(self._progress(0))

    def _wait_for_workers(self) -> list[WorkerHandle]:
        """Wait until enough workers are ready. The first time also for those that are on their way to a seat; later,
        survivors go on at once and the others join them when they come."""
        while True:
            self.claim.check()
            lease = self.watch.latest()
            if lease is not None:
                lost = self.crew.reconcile(lease)
                self.crew.settle(lease, ())
                self.budget.lost(hand.filling for hand in lost)
                for hand, why in self.crew.check():
                    self.budget.record_failure(f"{hand.host}: {why}", [hand.filling])
                self.budget.check()
                hands = self.crew.seats(lease.shape, self.hands)
                if hands and (self.number > 0 or self._is_full(lease, len(hands))):
                    return hands
                if not hands:
                    self.spec.layout.sizes(most_ranks(self.spec, lease.shape))  # raises when even all would be too few
                self.reporter.send(self._progress(0))
            time.sleep(TICK_S)

    def _is_full(self, lease: Lease, seated: int) -> bool:
        return self.crew.starting == 0 or seated == most_ranks(self.spec, lease.shape)

    def _report_membership(self) -> None:
        seats = {"hosts": [hand.host for hand in self.hands], "pids": [hand.pid for hand in self.hands]}
        sizes = str(self.spec.layout.sizes(len(self.hands)))
        spare = self.crew.ready - len(self.hands)
        self.record.event("formed", generation=self.number, world=len(self.hands), layout=sizes, spare=spare, **seats)
        self.reporter.send(self._progress(len(self.hands)))

    def _stepped(self, new: list[StepResult], beat: WorkerStatus) -> None:
        self.claim.check()
        if self.recovery is not None:
            told = self.recovery.over(time.monotonic(), new[0], beat)
            self.record.recovered(float(told["seconds"]), self.recovery.steps_lost(new[0]))
            self.record.event("recovered", **told)
            self.recovery = None
            self.pace.rest()
        self.budget.reached(new[-1].step)
        worked_s = sum(step.step_s for step in new)
        self.pace.stepped(len(new), time.monotonic(), worked_s)
        tokens_per_s = sum(step.tokens for step in new) / max(worked_s, 1e-9)
        self.reporter.send(self._progress(new[-1].world, tokens_per_s))

    def _handle_exit(self, ending: GenerationResult) -> None:
        if ending.error is not None:
            raise ending.error
        now_s, step = time.monotonic(), self.record.steps
        if self.recovery is None:
            self.recovery = Recovery(ending.began_s, ending.leave_s, now_s, step)
            self.record.broke_at_s = self.record.clock.now_s() - (now_s - ending.began_s)
        self.recovery.ended_s = now_s
        if ending.kind == "paused":
            self.record.resizes += 1
            self.record.event("resize", generation=self.number, step=step, why=ending.why)
        elif ending.kind == "oom":
            self._shrink_micro_batch(ending.why)
        else:
            self.record.restarts += 1
            self.record.event("broke", generation=self.number, step=step, why=ending.why)
            self.budget.broke(ending.why, [hand.filling for hand in ending.dead])

    def _micro_batch(self) -> int:
        first = self.spec.first_micro_batch(self.spec.layout.sizes(len(self.hands)))
        return first if self.fits is None else min(first, self.fits)

    def _shrink_micro_batch(self, why: str) -> None:
        before = self._micro_batch()
        self.fits = halve_micro_batch(before, self.spec.name)
        self.record.event("oom", generation=self.number, why=why, micro_batch=self.fits, was=before)

    def _progress(self, world: int, tokens_per_s: float = 0.0) -> dict[str, float | int | str]:
        record = self.record
        progress: dict[str, float | int | str] = {
            "step": record.steps,
            "steps": self.spec.steps,
            "tokens_per_s": round(tokens_per_s, 1),
            "restarts": record.restarts,
            "resizes": record.resizes,
            "steps_lost": record.steps_lost,
            "recovery_s": round(record.recovery_s, 3),
            "world": world,
            "settled": self.crew.settled,
        }
        if record.loss is not None:
            progress["loss"] = round(record.loss, 6)
        if (step_s := self.pace.step_s) is not None:
            progress["left_s"] = round((self.spec.steps - record.steps) * step_s, 3)
            progress["redo_s"] = round(self.spec.checkpoint_every * step_s, 3)
        if record.has_been_unsaved:  # what was told once stays, until something else is
            progress["not_saved"] = record.unsaved[:500]
        if record.lost_s and record.broke_at_s is not None:
            progress |= {"lost_s": round(record.lost_s, 3), "lost_at_s": round(record.broke_at_s, 3)}
        return progress
