"""Runs a training job over a lease: in its driver process, on the head.

One generation of ranks after another: staff the lease's members with workers, seat those that are ready, train until
something ends it. A break costs the steps since the last checkpoint; a planned change costs none.
"""

from __future__ import annotations

import time

from raytide.actors.trainer.core import RunResult
from raytide.actors.trainer.crew import Crew, Hand
from raytide.actors.trainer.generation import Ending, Generation
from raytide.actors.trainer.leases import LeaseWatch, Reporter
from raytide.actors.trainer.record import Record
from raytide.core.clock import Clock, SystemClock
from raytide.core.errors import RaytideError, TrainError
from raytide.core.ports import LeaseClient
from raytide.core.train_spec import TrainSpec

TICK_S = 0.1
MAX_FRUITLESS = 5
"""Breaks in a row without one step done, after which the cause is taken to be the run's own."""


def run_train(spec: TrainSpec, lease_client: LeaseClient, job_id: str, *, clock: Clock | None = None) -> RunResult:
    """Train `spec` on the lease of `job_id` to its end, through deaths, notices and returns of its members.

    Needs a process that is connected to Ray. Goes on from the latest checkpoint in `spec.out`. Raises what ended the
    run early: LeaseLostError, DataError, CheckpointError, StorageError or TrainError.
    """
    record = Record(spec, clock or SystemClock())
    driver = _Driver(spec, lease_client, job_id, record)
    try:
        driver.run()
    except RaytideError as error:
        record.close("failed", str(error))
        raise
    finally:
        driver.close()
    return record.close("done")


class _Driver:
    def __init__(self, spec: TrainSpec, client: LeaseClient, job_id: str, record: Record) -> None:
        self.spec, self.record = spec, record
        self.crew = Crew(spec, record)
        self.watch = LeaseWatch(client, job_id)
        self.reporter = Reporter(client, job_id)
        self.number = 0
        self.fruitless = 0
        self.stopped_s: float | None = None
        """When the gang stopped making steps; None while it makes them."""

    def run(self) -> None:
        while True:
            hands = self._gather()
            self.number += 1
            seats = {"hosts": [hand.host for hand in hands], "pids": [hand.pid for hand in hands]}
            self.record.event("formed", generation=self.number, world=len(hands), **seats)
            generation = Generation(self.number, self.spec, hands, self.crew, self.watch, self.record)
            ending = generation.run(on_steps=self._stepped)
            self._account(ending, had_steps=generation.steps > 0)
            if ending.kind == "done":
                return

    def close(self) -> None:
        self.watch.close()
        self.crew.close()
        self.reporter.close(self._progress(0))

    def _gather(self) -> list[Hand]:
        """Wait until enough workers are ready. The first time also for those that are on their way; later, survivors
        go on at once and the others join them when they come."""
        while True:
            lease = self.watch.latest()
            if lease is not None:
                self.crew.staff(lease)
                for hand, why in self.crew.check():
                    self._tired(f"{hand.host}: {why}")
                hands = self.crew.able(lease.shape)
                members = len({hand.member.index for hand in hands})
                if members >= lease.shape.at_least and (self.number > 0 or self.crew.starting == 0):
                    return hands
                self.reporter.send(self._progress(0))
            time.sleep(TICK_S)

    def _stepped(self, world: int, tokens_per_s: float) -> None:
        if self.stopped_s is not None:
            seconds = time.monotonic() - self.stopped_s
            self.record.recovered(seconds)
            self.record.event("recovered", seconds=round(seconds, 3), world=world, step=self.record.steps)
            self.stopped_s = None
        self.fruitless = 0
        self.reporter.send(self._progress(world, tokens_per_s))

    def _account(self, ending: Ending, *, had_steps: bool) -> None:
        if ending.kind == "failed":
            assert ending.error is not None
            raise ending.error
        if ending.kind == "done":
            self.record.finished()
            return
        self.stopped_s = self.stopped_s or ending.began_s
        if ending.kind == "paused":
            self.record.resizes += 1
            self.record.event("resize", generation=self.number, step=self.record.steps, why=ending.why)
            return
        self.record.restarts += 1
        self.record.event("broke", generation=self.number, step=self.record.steps, why=ending.why)
        if not had_steps:
            self._tired(ending.why)

    def _tired(self, why: str) -> None:
        self.fruitless += 1
        if self.fruitless > MAX_FRUITLESS:
            raise TrainError(
                f"{self.spec.name} broke {self.fruitless} times in a row without one step done; the last time: {why}.",
                hint="Mend that; the run goes on from its last checkpoint.",
            )

    def _progress(self, world: int, tokens_per_s: float = 0.0) -> dict[str, float | int | str]:
        record = self.record
        progress: dict[str, float | int | str] = {
            "step": record.steps,
            "steps": self.spec.steps,
            "tokens_per_s": round(tokens_per_s, 1),
            "restarts": record.restarts,
            "resizes": record.resizes,
            "recovery_s": round(record.recovery_s, 3),
            "world": world,
        }
        if record.loss is not None:
            progress["loss"] = round(record.loss, 6)
        return progress
