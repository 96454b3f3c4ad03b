"""The ranks of the tests of packed rows, mixtures and evaluation. A module by name, since their processes import it."""

from __future__ import annotations

import torch.distributed as dist

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.train import TrainSpec

Step = tuple[float, float | None]
"""A step's loss, and the evaluation's after it."""


def train(specs: dict[str, TrainSpec], rank: int, world: int, meet: str) -> dict[str, list[Step]]:
    """Every spec from its start, or its checkpoint, to its end."""
    out = {}
    for number, (name, spec) in enumerate(specs.items()):
        mine = process_group.join(
            dist.FileStore(f"{meet}-{number}", world), rank, spec.layout.sizes(world), timeout_s=60.0
        )
        trainer = Trainer(spec, mine)
        trainer.restore()
        out[name] = steps(trainer, spec.steps)
        trainer.close()
        process_group.leave()
    return out


def resized(spec: TrainSpec, stays: list[tuple[int, int]], rank: int, world: int, meet: str) -> list[Step]:
    """In turn `stays` of (ranks, last step): each group goes on from the checkpoint of the one before."""
    out = []
    for number, (ranks, until) in enumerate(stays):
        if rank < ranks:
            store = dist.FileStore(f"{meet}-{number}", ranks)
            mine = process_group.join(store, rank, spec.layout.sizes(ranks), timeout_s=60.0, generation=number)
            trainer = Trainer(spec, mine)
            trainer.restore()
            out += steps(trainer, until)
            trainer.flush()
            trainer.close()
            process_group.leave()
    return out


def steps(trainer: Trainer, until: int) -> list[Step]:
    out = []
    while trainer.steps_done < until:
        result = trainer.step()
        assert result is not None
        out.append((result.loss, result.eval_loss))
    return out
