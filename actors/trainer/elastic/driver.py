"""Runs a training job over a lease. This code runs in the job's driver process on the head node.

The driver runs one generation of ranks after another. For each generation it starts workers on the lease's members,
assigns ranks to ready workers, and trains until the generation ends. A failure costs the steps since the last
snapshot or checkpoint. A planned change costs no steps.
"""

from __future__ import annotations

import re
import time
from contextlib import closing
from functools import partial

from raytide.actors.gang.lease_watch import LeaseWatch, ProgressReporter
from raytide.actors.trainer.elastic.generation import GenerationResult, GenerationRunner
from raytide.actors.trainer.elastic.rank_assignment import most_ranks
from raytide.actors.trainer.elastic.ray_worker import RayWorker, StartWorker
from raytide.actors.trainer.elastic.recovery import Recovery, ScalingEfficiency, StepRate
from raytide.actors.trainer.elastic.restart_policy import RestartPolicy
from raytide.actors.trainer.elastic.stragglers import RankTimes
from raytide.actors.trainer.elastic.worker_group import WorkerGroup, WorkerHandle
from raytide.actors.trainer.run_log.writer import RunLog
from raytide.actors.trainer.types import MicroBatchLimit, RunResult, StepResult, WorkerStatus
from raytide.core.clock import SystemClock
from raytide.core.errors import LeaseLostError, RaytideError, StorageError, WaitTimeoutError
from raytide.core.io.claim import Claim
from raytide.core.io.storage import FullDiskError
from raytide.core.objects.gang import LeaseClient
from raytide.core.specs.train import TrainSpec

TICK_S = 0.05
STORE_WAIT_S = 5.0
"""The seconds after which a gang forms again that did not reach its store."""


def run_train(spec: TrainSpec, lease_client: LeaseClient, job_id: str, *, start: StartWorker = RayWorker) -> RunResult:
    """Trains `spec` to its end on the lease of `job_id`. Members may be lost, leave and return meanwhile.

    Needs a process that is connected to Ray, unless `start` makes workers that do not use Ray. Resumes from the latest
    checkpoint in `spec.out`. Raises the error that ended the run early, such as LeaseLostError, ConfigError, DataError,
    CheckpointError, StorageError or TrainError. Raises ConflictError if another run is writing to `spec.out`.
    """
    claim = Claim(spec.places, job_id, is_over=partial(_is_over, lease_client))
    try:
        record = RunLog(spec, SystemClock(), logs_steps=False, claim=claim.token)

        def train() -> None:
            with closing(_Driver(spec, lease_client, job_id, record, start, claim)) as driver:
                driver.run()

        return record.log_run(train)
    finally:
        claim.release()


def _is_over(client: LeaseClient, holder: str) -> bool:
    """Returns whether the job `holder`, which holds a claim, has ended. `holder` comes from a file and is untrusted."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", holder):
        return False
    try:
        client.lease(holder)
    except LeaseLostError:
        return True
    except RaytideError:  # unknown, another team's, or the API is unreachable: the claim's heartbeats decide
        return False
    return False


class _Driver:
    def __init__(
        self, spec: TrainSpec, client: LeaseClient, job_id: str, record: RunLog, start: StartWorker, claim: Claim
    ) -> None:
        self.spec, self.record, self.claim = spec, record, claim
        self.worker_group = WorkerGroup(spec, record, start)
        self.watch = LeaseWatch(client, job_id)
        self.reporter = ProgressReporter(client, job_id)
        self.restart_policy = RestartPolicy(spec.name, furthest_step=record.steps)
        self.micro_batch = MicroBatchLimit(spec.name)
        self.generation = 0
        self.workers: list[WorkerHandle] = []
        """The workers of the last generation, by rank."""
        self.recovery: Recovery | None = None
        """The recovery in progress, from the end of a generation to its successor's first step."""
        self.saved_at_s: float | None = None
        self.step_rate = StepRate(record.step_s)
        self.scaling = ScalingEfficiency()
        self.rank_times = RankTimes()

    def run(self) -> None:
        ran_out_of_memory = False
        while True:
            self.workers = self._wait_for_workers()
            self.generation += 1
            self._report_membership()
            if not ran_out_of_memory:
                self._grow_micro_batch()
            if self.recovery is not None:
                self.recovery.assigned_s = time.monotonic()
            generation = GenerationRunner(
                self.generation,
                self.spec,
                self.workers,
                self.worker_group,
                self.watch,
                self.record,
                micro_batch=self.micro_batch.bound(self._first_micro_batch()),
                claim=self.claim.token,
                on_steps=self._on_steps,
            )
            self.rank_times = generation.rank_times
            result = generation.run()
            if result.kind == "done":
                self.record.mark_finished()
                return
            self._handle_exit(result)
            ran_out_of_memory = result.kind == "oom"

    def close(self) -> None:
        self.watch.close()
        self.worker_group.close()
        self.reporter.close(self._progress(len(self.workers)))  # a finished run still tells how many ranks it had

    def _wait_for_workers(self) -> list[WorkerHandle]:
        """Waits until enough workers are ready, and returns those of the next generation. The first generation also
        waits for workers that are starting; later ones continue with the survivors at once, and others join when they
        are ready.
        """
        while True:
            self.claim.check()
            lease = self.watch.latest()
            if lease is not None:
                self.worker_group.reconcile(lease)
                self.worker_group.settle(lease, ())
                self.restart_policy.record_members(lease.members)
                for worker, why, error in self.worker_group.check():
                    if error is not None and (self.generation == 0 or self.worker_group.ready == 0):
                        raise error
                    self.restart_policy.record_failed_start(worker.key, f"{worker.host}: {why}")
                self.restart_policy.raise_if_exhausted()
                workers = self.worker_group.assign(lease.shape, self.workers)
                is_full = self.worker_group.starting == 0 or len(workers) == most_ranks(self.spec, lease.shape)
                if workers and (self.generation > 0 or is_full):
                    return workers
                if not workers:
                    if self.worker_group.starting == 0 and (refusal := self.worker_group.refusal) is not None:
                        raise refusal
                    self.spec.layout.sizes(
                        most_ranks(self.spec, lease.shape)
                    )  # raises if even a full gang would be too small
                self.reporter.send(self._progress(0))
            time.sleep(TICK_S)

    def _report_membership(self) -> None:
        membership = {
            "hosts": [worker.host for worker in self.workers],
            "pids": [worker.pid for worker in self.workers],
        }
        sizes = str(self.spec.layout.sizes(len(self.workers)))
        spare = self.worker_group.ready - len(self.workers)
        self.record.event(
            "formed", generation=self.generation, world=len(self.workers), layout=sizes, spare=spare, **membership
        )
        self.reporter.send(self._progress(len(self.workers)))

    def _on_steps(self, new: list[StepResult], status: WorkerStatus) -> None:
        self.claim.check()
        if self.recovery is not None:
            event = self.recovery.finished_event(time.monotonic(), new[0], status)
            self.record.record_recovery(float(event["seconds"]), self.recovery.steps_lost(new[0]))
            self.record.event("recovered", **event)
            self.recovery = None
            self.step_rate.pause()
        self.restart_policy.record_step(new[-1].step)
        self.micro_batch.record_steps(len(new))
        worked_s = sum(step.step_s for step in new)
        self.step_rate.record_steps(len(new), time.monotonic(), worked_s)
        tokens_per_s = sum(step.tokens for step in new) / max(worked_s, 1e-9)
        self.scaling.record(new[-1].world, tokens_per_s, len(new))
        if any(step.step % self.spec.checkpoint_every == 0 and not step.unsaved for step in new):
            self.saved_at_s = self.record.clock.now_s()
        self.reporter.send({**self._progress(new[-1].world, tokens_per_s), **self._step_values(new, worked_s)})

    def _handle_exit(self, result: GenerationResult) -> None:
        if result.error is not None and not self._waits_for_store(result.error):
            raise result.error
        now_s, step = time.monotonic(), self.record.steps
        if self.recovery is None:
            self.recovery = Recovery(result.began_s, result.leave_s, now_s, step)
            self.record.broke_at_s = self.record.clock.now_s() - (now_s - result.began_s)
        self.recovery.ended_s = now_s
        if result.kind == "paused":
            self.record.resizes += 1
            self.record.event("resize", generation=self.generation, step=step, why=result.why)
        elif result.kind == "oom":
            self._shrink_micro_batch(result.why)
        elif result.error is not None:
            self.record.restarts += 1
            self.record.event("broke", generation=self.generation, step=step, why=result.why)
            time.sleep(STORE_WAIT_S)
        else:
            self.record.restarts += 1
            self.record.event("broke", generation=self.generation, step=step, why=result.why)
            self.restart_policy.record_break(result.why, [worker.incarnation for worker in result.dead])

    def _waits_for_store(self, error: RaytideError) -> bool:
        """Returns whether the gang forms again although it failed with `error`: its store was away while it recovered.
        The ranks may hold newer state than the store, and keep it. They wait as long as a rank may take to load.
        """
        is_away = isinstance(error, StorageError | WaitTimeoutError) and not isinstance(error, FullDiskError)
        if self.recovery is None or not is_away:
            return False
        return time.monotonic() - self.recovery.began_s < self.spec.stall_timeout_s

    def _first_micro_batch(self) -> int:
        return self.spec.first_micro_batch(self.spec.layout.sizes(len(self.workers)))

    def _shrink_micro_batch(self, why: str) -> None:
        before = self.micro_batch.bound(self._first_micro_batch())
        half = self.micro_batch.halve(before, len(self.workers))
        self.record.event("oom", generation=self.generation, why=why, micro_batch=half, was=before)

    def _grow_micro_batch(self) -> None:
        """Lets a halved microbatch grow again. Called when the gang forms, since a change needs a new generation."""
        wanted = self._first_micro_batch()
        before = self.micro_batch.bound(wanted)
        if self.micro_batch.grow(wanted, len(self.workers)):
            grown = self.micro_batch.bound(wanted)
            self.record.event("micro_batch", generation=self.generation, micro_batch=grown, was=before)

    def _step_values(self, new: list[StepResult], worked_s: float) -> dict[str, float | int | str]:
        """Returns progress values of the last steps: step time and the share of it spent waiting for data, scaling
        efficiency, the slowest rank, MFU, the peak memory of a GPU, and the times of the last step's end and of the
        last due checkpoint. The peak is 0 if the microbatch is not the spec's, whose memory the planner predicts.
        """
        now_s = round(self.record.clock.now_s(), 3)
        values: dict[str, float | int | str] = {"step_s": round(worked_s / len(new), 6), "step_at_s": now_s}
        values["data_wait"] = round(sum(step.times.get("data", 0.0) for step in new) / max(worked_s, 1e-9), 6)
        if (scaling := self.scaling.of(new[-1].world)) is not None:
            values["scaling"] = round(scaling, 4)
        rank, ratio = self.rank_times.slowest() or (0, 1.0)  # reported values persist until they are overwritten
        values |= {"slowest_rank": rank, "slowest_ratio": round(ratio, 3)}
        if self.rank_times.gpu_bytes:
            wanted = self.spec.first_micro_batch(self.spec.layout.sizes(new[-1].world))
            values["peak_bytes"] = self.rank_times.gpu_bytes if new[-1].micro_batch == wanted else 0
        if (mfu := new[-1].mfu) is not None:
            values["mfu"] = round(mfu, 6)
        if self.saved_at_s is not None:
            values["saved_at_s"] = round(self.saved_at_s, 3)
        return values

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
            "settled": self.worker_group.settled_version,
        }
        if record.loss is not None:
            progress["loss"] = round(record.loss, 6)
        if record.eval_loss is not None:
            progress["eval_loss"] = round(record.eval_loss, 6)
        if (step_s := self.step_rate.step_s) is not None:
            progress["left_s"] = round((self.spec.steps - record.steps) * step_s, 3)
            progress["redo_s"] = round(self.spec.checkpoint_every * step_s, 3)
        if record.has_been_unsaved:  # reported values persist until they are overwritten
            progress["not_saved"] = record.unsaved[:500]
        if images := self.worker_group.images:
            progress["image"] = images
        if self.worker_group.has_refused:
            progress["not_joined"] = self.worker_group.refused[:500]
        if record.lost_s and record.broke_at_s is not None:
            progress |= {"lost_s": round(record.lost_s, 3), "lost_at_s": round(record.broke_at_s, 3)}
        return progress
