"""One rank of the gang: an actor that outlives every re-forming of it.

All torch work runs on one thread of its own, so that the actor answers `poll` and `pause` while a step runs. A broken
collective is an outcome, not the actor's death: the process and its imports are what makes a recovery quick.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from raytide.actors.trainer.core import Beat, Outcome, Seat, StepResult
from raytide.core.errors import RaytideError
from raytide.core.train_spec import TrainSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from raytide.actors.trainer.group import Group

T = TypeVar("T")


class TrainWorker:
    def __init__(self, spec: TrainSpec, threads: int) -> None:
        self._spec, self._threads = spec, threads
        self._torch = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch", initializer=self._prepare)
        self._store: TCPStore | None = None
        self._lock = threading.Lock()
        self._generation, self._paused = -1, -1
        self._phase, self._phase_since = "idle", time.monotonic()
        self._steps: list[StepResult] = []
        self._skipped: list[str] = []

    def ready(self) -> int:
        """The process id, once the imports are done and the worker can take a seat."""
        return self._on_torch(os.getpid)

    def open_store(self, address: str, world: int) -> int:
        """Open the store of a new generation on this rank's host and return its port."""
        return self._on_torch(lambda: self._open_store(address, world))

    def train(self, seat: Seat) -> Outcome:
        """Join the generation, load the latest checkpoint, train until something ends it, and leave it."""
        return self._on_torch(lambda: self._train(seat))

    def pause(self, generation: int) -> None:
        """Make all ranks of this generation, through this one, checkpoint before their next step and stop there."""
        self._paused = generation

    def poll(self) -> Beat:
        with self._lock:
            steps, self._steps = self._steps, []
            skipped, self._skipped = self._skipped, []
            return Beat(self._generation, self._phase, time.monotonic() - self._phase_since, steps, skipped)

    def _on_torch(self, work: Callable[[], T]) -> T:
        return self._torch.submit(work).result()

    def _prepare(self) -> None:
        import torch

        from raytide.actors.trainer import loop  # noqa: F401  imported now, so that forming a gang does not wait for it

        torch.set_num_threads(self._threads)

    def _open_store(self, address: str, world: int) -> int:
        from raytide.actors.trainer import group

        self._store = group.open_store(address, world)
        return self._store.port

    def _train(self, seat: Seat) -> Outcome:
        from raytide.actors.trainer import group

        with self._lock:
            self._generation, self._steps, self._skipped = seat.generation, [], []
        try:
            self._at("joining")
            mine = group.join(
                self._meet(seat),
                seat.rank,
                self._spec.layout.sizes(seat.world),
                timeout_s=self._spec.collective_timeout_s,
                address=seat.address,
                generation=seat.generation,
            )
            return self._run(mine)
        except RaytideError as error:
            return Outcome("failed", str(error), error)
        except Exception as error:  # torch raises RuntimeError and its kin for a peer that is gone
            return Outcome("broken", "".join(traceback.format_exception(error)).strip()[-2000:])
        finally:
            gc.collect()  # FSDP's cycles hold the group, and closing its sockets is what wakes the peers
            group.leave()
            self._store = None
            self._at("idle")

    def _run(self, mine: Group) -> Outcome:
        from raytide.actors.trainer.loop import Trainer

        self._at("loading")
        trainer = Trainer(self._spec, mine)
        skipped = [str(error) for error in trainer.restore()]
        with self._lock:
            self._skipped = skipped
        self._at(f"step {trainer.steps_done + 1}")
        finished = trainer.run(on_step=self._did, paused=lambda: self._paused == self._generation)
        return Outcome("done" if finished else "paused")

    def _did(self, result: StepResult) -> None:
        with self._lock:
            self._steps.append(result)
        self._at(f"after step {result.step}")

    def _at(self, phase: str) -> None:
        self._phase, self._phase_since = phase, time.monotonic()

    def _meet(self, seat: Seat) -> TCPStore:
        from raytide.actors.trainer import group

        if seat.rank == 0:
            assert self._store is not None, "rank 0 opens the store before it takes its seat"
            return self._store
        return group.reach_store(*seat.store, seat.world)
