"""The worker of one rank: an actor that outlives generations.

Torch runs on a thread of its own, so that the actor answers `poll` and `pause` during a step. If a collective
breaks, `train` returns a WorkerExit that reports the failure, and the worker lives on. The process and its imports
are kept, which makes recovery fast.
"""

from __future__ import annotations

import gc
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from raytide.actors.gang.packages import keep_own
from raytide.actors.trainer.elastic.worker_status import StatusRecorder
from raytide.actors.trainer.run_log.writer import StepLog
from raytide.actors.trainer.types import RankAssignment, StepResult, StopRequest, WorkerExit, WorkerStatus
from raytide.core.clock import SystemClock
from raytide.core.errors import RaytideError
from raytide.core.specs.train import TrainSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from raytide.actors.trainer.checkpoint.peers.snapshot import Snapshots
    from raytide.actors.trainer.distributed.process_group import ProcessGroup
    from raytide.actors.trainer.elastic.compute_timer import ComputeTimer
    from raytide.actors.trainer.trainer import Trainer

T = TypeVar("T")
OWN_SHARE = 0.9
"""The share of `collective_timeout_s` that the collectives themselves may take; the rest is for finding the rank that
they waited for.
"""


class TrainWorker:
    def __init__(self, spec: TrainSpec, threads: int, host: str) -> None:
        keep_own()
        self._spec, self._threads, self._host = spec, threads, host
        self._torch = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch", initializer=self._prepare)
        self._store: TCPStore | None = None
        self._status = StatusRecorder()
        self._generation, self._stop = -1, StopRequest.NO
        self._snapshots: Snapshots | None = None

    def ready(self) -> int:
        """Waits for the imports and returns the process id. The worker can then take a rank."""
        return self._on_torch(os.getpid)

    def wait_for_exit(self) -> None:
        """Never returns. The driver notices the end of this process because its call of this method fails."""
        threading.Event().wait()

    def open_store(self, address: str, world: int) -> int:
        """Opens the rendezvous store of a new generation on this host and returns its port."""
        return self._on_torch(lambda: self._open_store(address, world))

    def train(self, assignment: RankAssignment) -> WorkerExit:
        """Joins a generation, loads the newest state, trains until the generation ends, and leaves the generation."""
        return self._on_torch(lambda: self._train(assignment))

    def pause(self, generation: int, how: StopRequest) -> None:
        """Makes all ranks of the generation stop before their next step."""
        self._generation, self._stop = generation, how

    def poll(self) -> WorkerStatus:
        return self._status.read()

    def _on_torch(self, work: Callable[[], T]) -> T:
        return self._torch.submit(work).result()

    def _prepare(self) -> None:
        os.environ.update(self._spec.nccl)
        import torch

        torch.set_num_threads(self._threads)
        gc.collect()
        gc.freeze()  # imports stay: collecting garbage when leaving a group then skips them

    def _open_store(self, address: str, world: int) -> int:
        from raytide.actors.trainer.distributed import process_group

        self._store = process_group.create_store(address, world)
        return self._store.port

    def _train(self, assignment: RankAssignment) -> WorkerExit:
        from raytide.actors.trainer.distributed import process_group

        self._status.open(assignment.generation)
        worker_exit = self._attempt(assignment)
        self._status.enter_phase("leaving", lap="leave")
        if self._snapshots is not None:
            self._snapshots.close()  # the trainer has not, if it failed as it was built
        gc.collect()  # FSDP's cycles hold the group, whose sockets must close to wake the peers
        process_group.leave()
        self._store = None
        self._status.enter_phase("idle")
        return replace(worker_exit, last_status=self._status.read())

    def _attempt(self, assignment: RankAssignment) -> WorkerExit:
        from raytide.actors.trainer.parallel.micro_batch import is_out_of_memory

        try:
            return self._run(assignment, self._join(assignment))
        except RaytideError as error:
            each: BaseException | None = error
            while each is not None:  # their frames keep the group's sockets open, and so peers waiting
                each.__traceback__, each = None, each.__cause__ or each.__context__
            return WorkerExit("failed", str(error), error)
        except Exception as error:  # torch raises RuntimeError and others for a lost peer
            detail = "".join(traceback.format_exception(error)).strip()[-2000:]
            if is_out_of_memory(error):
                return WorkerExit("oom", detail)
            return WorkerExit("broken", detail, timed_out="timed out" in str(error).lower())

    def _join(self, assignment: RankAssignment) -> ProcessGroup:
        from raytide.actors.trainer.distributed import process_group

        self._status.enter_phase("joining", lap="join")
        return process_group.join(
            self._connect_store(assignment),
            assignment.rank,
            self._spec.layout.sizes(assignment.world),
            timeout_s=self._spec.collective_timeout_s * OWN_SHARE,
            address=assignment.address,
            generation=assignment.generation,
            stall_timeout_s=self._spec.stall_timeout_s,
        )

    def _run(self, assignment: RankAssignment, group: ProcessGroup) -> WorkerExit:
        from raytide.actors.trainer.checkpoint.peers.snapshot import Snapshots
        from raytide.actors.trainer.elastic.compute_timer import ComputeTimer
        from raytide.actors.trainer.trainer import Trainer

        self._status.enter_phase("building", lap="build")
        self._snapshots = self._snapshots or Snapshots(self._host)
        spec = self._spec.model_copy(update={"micro_batch": assignment.micro_batch})
        trainer = Trainer(spec, group, self._snapshots, assignment.claim)
        try:
            self._status.enter_phase("loading", lap="load")
            # Before `restore`, in which the other ranks wait for this one longer than in a step.
            log = StepLog(spec, SystemClock(), trainer.folder) if group.is_first else None
            rejected = trainer.restore()
            self._status.restored(trainer.restored_from, [str(error) for error in rejected])
            self._status.enter_phase(f"step {trainer.steps_done + 1}", lap="first_step")
            timer = (
                None if spec.memory.compile else ComputeTimer(trainer.model_parts, group.device)
            )  # hooks break graphs
            finished = trainer.run(
                on_step=self._on_step(trainer, log, timer), paused=lambda: self._stop_request(assignment)
            )
        finally:
            trainer.close()
        return WorkerExit("done" if finished else "paused")

    def _on_step(
        self, trainer: Trainer, log: StepLog | None, timer: ComputeTimer | None
    ) -> Callable[[StepResult], None]:
        def record(result: StepResult) -> None:
            if timer is not None:
                result = replace(result, forward_s=timer.drain_forward_s())
            if log is not None:
                log.add(result)
            self._status.record_step(result, trainer.checkpoints.save_s)

        return record

    def _stop_request(self, assignment: RankAssignment) -> StopRequest:
        return self._stop if self._generation == assignment.generation else StopRequest.NO

    def _connect_store(self, assignment: RankAssignment) -> TCPStore:
        from raytide.actors.trainer.distributed import process_group

        if assignment.rank == 0:
            assert self._store is not None, "rank 0 opens the store before it trains"
            return self._store
        return process_group.connect_store(*assignment.store, assignment.world)
