"""Ranks as processes for the trainer's tests, and what they do. A module by name, since the processes import it.

They are forked by Python's forkserver, which has imported torch, the trainer and this module, none of which starts a
thread of its own: a fork of the test's own process would inherit Ray's threads without their state and hang, and a
spawned one takes 5 s to import torch.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.run_log import profiler
from raytide.actors.trainer.trainer import Trainer
from raytide.actors.trainer.types import StepResult
from raytide.core.specs.train import TrainSpec

PRELOAD = [
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict"),
    *("raytide.actors.trainer.trainer", "raytide.actors.trainer.elastic.worker", "tests.actors.trainer.trainer_ranks"),
]


def run(
    world: int,
    meet: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    timeout_s: float,
    dying: Collection[int] = (),
) -> list[Any]:
    """`work(*args, rank, world, meet)` in each rank; AssertionError with the traceback of one that raises or hangs.
    None for the `dying` ranks, which give nothing."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    context = multiprocessing.get_context("forkserver")
    pipes, children = [], []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(there, work, args, rank, world, meet), daemon=True)
        child.start()
        there.close()
        pipes.append(here)
        children.append(child)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout_s), f"rank {rank} of {world} gave nothing within {timeout_s} s"
            if rank in dying:
                results.append(None)
                continue
            ok, value = pipe.recv()
            assert ok, f"rank {rank} of {world} failed:\n{value}"
            results.append(value)
        return results
    finally:
        for child in children:
            child.join(5.0)
            child.kill()
            child.join()


def train(spec: TrainSpec, rank: int, world: int, meet: str) -> list[float]:
    """This rank's view of every step's loss, from the latest checkpoint to the end."""
    return stop_at(spec, spec.steps + 1, rank, world, meet)


def stop_at(spec: TrainSpec, until: int, rank: int, world: int, meet: str) -> list[float]:
    """As `train`, but the last rank asks to pause once `until` steps are done."""
    mine = process_group.join(dist.FileStore(meet, world), rank, spec.layout.sizes(world), timeout_s=30.0)
    trainer = Trainer(spec, mine)
    trainer.restore()
    losses: list[float] = []
    finished = trainer.run(
        on_step=lambda result: losses.append(result.loss),
        paused=lambda: rank == world - 1 and trainer.steps_done >= until,
    )
    assert finished == (until > spec.steps)
    process_group.leave()
    return losses


def shrink_and_grow(spec: TrainSpec, rank: int, world: int, meet: str) -> list[float]:
    """2 ranks to step 3, rank 0 alone to step 6, both to the end, each in the one process that it has."""
    losses = stop_at(spec, 3, rank, 2, meet + "a")
    if rank == 0:
        losses += stop_at(spec, 6, 0, 1, meet + "b")
    losses += train(spec, rank, 2, meet + "c")  # rank 1 waits here for the one that went on alone
    return losses


def watched(spec: TrainSpec, rank: int, world: int, meet: str) -> list[StepResult]:
    """Every step's result; the last rank's loss is no number in step 2, and after step 3 a profile is asked for."""
    Path(spec.out).mkdir(parents=True, exist_ok=True)  # as the driver does
    mine = process_group.join(dist.FileStore(meet, world), rank, spec.layout.sizes(world), timeout_s=30.0)
    trainer = Trainer(spec, mine)
    trainer.model_parts[-1].register_forward_hook(
        lambda module, inputs, loss: loss * (math.nan if rank == world - 1 and trainer.steps_done == 1 else 1.0)
    )
    results: list[StepResult] = []

    def done(result: StepResult) -> None:
        results.append(result)
        if rank == 0 and result.step == 3:
            profiler.request(spec.out, 2)

    trainer.run(on_step=done)
    process_group.leave()
    return results


def _child(pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, meet: str) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, work(*args, rank, world, meet)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)
