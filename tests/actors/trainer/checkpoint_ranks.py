"""The work of ranks in the tests of checkpoints and snapshots. A module by name, since the processes import it."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem

from raytide.actors.trainer.checkpoint import manifest
from raytide.actors.trainer.checkpoint.dcp import storage
from raytide.actors.trainer.checkpoint.peers.snapshot import Snapshots
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.runners.local import train_local
from raytide.actors.trainer.trainer import Trainer
from raytide.core.errors import RaytideError
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec

KILLS = 4


def join(spec: TrainSpec, rank: int, world: int, meet: str, generation: int = 0) -> process_group.ProcessGroup:
    store = dist.FileStore(meet, world)
    return process_group.join(store, rank, spec.layout.sizes(world), timeout_s=30.0, generation=generation)


def train_with_full_disk(
    spec: TrainSpec, rank: int, world: int, meet: str
) -> tuple[int, set[str], RaytideError | None]:
    """The steps done, what was told of saves, and the error, where rank 1 has no space left for its second save."""
    unsaved: set[str] = set()
    trainer = Trainer(spec, join(spec, rank, world, meet))
    trainer.restore()
    write_item = filesystem._write_item

    def full(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and trainer.checkpoints._count == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_item(*args, **kwargs)

    filesystem._write_item = full
    try:
        trainer.run(on_step=lambda result: unsaved.add(result.unsaved))
    except RaytideError as error:
        return trainer.steps_done, unsaved - {""}, error
    finally:
        trainer.close()
        process_group.leave()
    return trainer.steps_done, unsaved - {""}, None


def train_until_killed(spec: TrainSpec, after_bytes: int) -> None:
    """Train alone; SIGKILL strikes in the middle of the write that reaches this many bytes of checkpoints."""
    torch.set_num_threads(1)
    left = after_bytes
    write = storage._HashingStream.write

    def counted(self: Any, chunk: Any) -> int:
        nonlocal left
        size = memoryview(chunk).nbytes
        if size > left:
            self._stream.write(memoryview(chunk).cast("B")[:left])
            self._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        left -= size
        return write(self, chunk)

    storage._HashingStream.write = counted  # type: ignore[method-assign]
    train_local(spec)
    os._exit(0)


@dataclass(frozen=True, slots=True)
class Phase:
    """Train in `out`, on so many of the ranks, from what another run had saved at a step (if any) to step `until`."""

    out: str
    ranks: int
    until: int
    after: tuple[str, int] | None = None
    layout: Parallelism = field(default_factory=Parallelism)


def phases(spec: TrainSpec, plan: list[Phase], rank: int, world: int, meet: str) -> list[Reached | None]:
    """One after the other, in the same processes."""
    reached: list[Reached | None] = []
    for number, phase in enumerate(plan):
        if rank >= phase.ranks:
            reached.append(None)
            continue
        here = spec.model_copy(update={"out": f"{spec.out}/{phase.out}", "layout": phase.layout})
        if rank == 0 and phase.after is not None:
            _copy(f"{spec.out}/{phase.after[0]}", phase.after[1], here.out)
        reached.append(_reach(here, phase.until, rank, phase.ranks, f"{meet}-{number}"))
    return reached


def _reach(spec: TrainSpec, until: int, rank: int, world: int, meet: str) -> Reached:
    trainer = Trainer(spec, join(spec, rank, world, meet))
    trainer.restore()
    began, losses = trainer.steps_done, list[float]()
    trainer.run(
        on_step=lambda result: losses.append(result.loss),
        paused=lambda: rank == world - 1 and trainer.steps_done >= until,
    )
    state = {piece.name: piece.local.numpy().tobytes() for piece in trainer.state.shards()}
    reached = Reached(trainer.restored_from, began, losses, state)
    trainer.close()
    trainer = None  # type: ignore[assignment]
    leave()
    return reached


def _copy(source: str, step: int, target: str) -> None:
    """A run that has only the checkpoint of one step."""
    for path in Path(source, "checkpoints").iterdir():
        if manifest.step_of(path.name) == step:
            shutil.copytree(path, Path(target, "checkpoints", path.name))


@dataclass(frozen=True, slots=True)
class Reached:
    """A rank's first step, the losses of its steps, and all that it has of the state then."""

    source: str
    began: int
    losses: list[float]
    state: dict[str, bytes]


Resumed = dict[str, Any]
"""`from`, `at` and `losses` by step."""


def lose_ranks(
    spec: TrainSpec, hosts: str, lost: list[int], at: tuple[str, int], rank: int, world: int, meet: str
) -> Resumed:
    """Train on `hosts` (a letter for each rank) until the `lost` ranks die; the others form again and go on to the end.

    `at`: ("step", 5) is after step 5; ("exchange", 2) in the middle of the exchange of the second snapshot,
    ("save", 2) in the middle of the second save.
    """
    snapshots = Snapshots(hosts[rank])
    trainer = Trainer(spec, join(spec, rank, world, meet), snapshots)
    trainer.restore()
    what, when = at
    if rank in lost and what == "exchange":
        _die_in_exchange(when)
    if rank in lost and what == "save":
        _die_in_save(trainer, when)

    def on_step(step: int) -> None:
        if rank in lost and what == "step" and step == when:
            snapshots.wait()
            os._exit(1)

    with suppress(Exception):  # whatever torch raises for a peer that is gone
        trainer.run(on_step=lambda result: on_step(result.step))
    trainer.close()
    trainer = None  # type: ignore[assignment]
    leave()
    left = [other for other in range(world) if other not in lost]
    return go_on(spec, snapshots, join(spec, left.index(rank), len(left), meet + "-again", 1))


def grow(spec: TrainSpec, until: int, rank: int, world: int, meet: str) -> Resumed:
    """All but the last rank train to step `until` and pause; then the last one joins them."""
    snapshots = Snapshots(str(rank))
    if rank < world - 1:
        trainer = Trainer(spec, join(spec, rank, world - 1, meet), snapshots)
        trainer.restore()
        assert not trainer.run(on_step=lambda result: None, paused=lambda: trainer.steps_done >= until)
        trainer.close()
        trainer = None  # type: ignore[assignment]
        leave()
    return go_on(spec, snapshots, join(spec, rank, world, meet + "-again", 1))


def go_on(spec: TrainSpec, snapshots: Snapshots, mine: process_group.ProcessGroup) -> Resumed:
    trainer = Trainer(spec, mine, snapshots)
    trainer.restore()
    found = {"from": trainer.restored_from, "at": trainer.steps_done}
    losses: dict[int, float] = {}
    trainer.run(on_step=lambda result: losses.update({result.step: result.loss}))
    trainer.close()
    del trainer
    leave()
    return {**found, "losses": losses}


def leave() -> None:
    gc.collect()  # FSDP's cycles hold the group
    process_group.leave()


def _die_in_exchange(number: int) -> None:
    isend, sent = dist.isend, itertools.count(1)

    def cut(*args: Any, **kwargs: Any) -> Any:
        if next(sent) == number:
            os._exit(1)
        return isend(*args, **kwargs)

    dist.isend = cut


def _die_in_save(trainer: Trainer, number: int) -> None:
    write = storage._HashingStream.write

    def cut(self: Any, chunk: Any) -> int:
        if trainer.checkpoints._count == number:
            os._exit(1)
        return write(self, chunk)

    storage._HashingStream.write = cut  # type: ignore[method-assign]
