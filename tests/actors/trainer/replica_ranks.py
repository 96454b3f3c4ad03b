"""The ranks of the replica tests: runs one after the other in the same processes."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.distributed.local_shards import local
from raytide.actors.trainer.trainer import Trainer
from raytide.actors.trainer.types import StepResult
from raytide.core.errors import RaytideError
from raytide.core.specs.train import TrainSpec

Ended = tuple[int, str]
"""The steps done and the error, if there was one."""


def run_all(specs: list[TrainSpec], flips: list[int | None], rank: int, world: int, meet: str) -> list[Ended]:
    """Each spec to its end; where `flips` has a rank, that one's weights change by one bit after step 3."""
    gc.freeze()
    each = enumerate(zip(specs, flips, strict=True))
    return [_run(spec, flip, rank, world, f"{meet}-{index}") for index, (spec, flip) in each]


def _run(spec: TrainSpec, flip: int | None, rank: int, world: int, meet: str) -> Ended:
    mine = process_group.join(dist.FileStore(meet, world), rank, spec.layout.sizes(world), timeout_s=30.0)
    ended = _train(Trainer(spec, mine), flip == rank)
    gc.collect()
    process_group.leave()
    return ended


def _train(trainer: Trainer, flips: bool) -> Ended:
    def on_step(result: StepResult) -> None:
        if flips and result.step == 3:
            _flip(trainer)

    try:
        trainer.run(on_step=on_step)
    except RaytideError as error:
        return trainer.steps_done, str(error)
    finally:
        trainer.close()
    return trainer.steps_done, ""


@torch.no_grad()
def _flip(trainer: Trainer) -> None:
    """The lowest bit of one number, as a fault of memory would."""
    bits = local(trainer._weights[-1]).view(torch.int32).view(-1)
    bits[len(bits) // 2] ^= 1
