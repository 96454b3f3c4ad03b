"""What ranks do in the tests of models. A module by name, since their processes import it."""

from __future__ import annotations

import torch.distributed as dist

from raytide.actors.trainer import group
from raytide.actors.trainer.loop import Trainer
from raytide.core.train_spec import TrainSpec


def export_and_tune(
    specs: list[TrainSpec], tuned: TrainSpec, rank: int, world: int, meet: str
) -> tuple[list[str], list[float]]:
    """Where the specs' models were exported to as they start, and this rank's losses of a whole run."""
    mine = group.join(dist.FileStore(meet, world), rank, tuned.layout.sizes(world), timeout_s=30.0)
    paths = [Trainer(spec, mine).export() for spec in specs]
    losses: list[float] = []
    Trainer(tuned, mine).run(on_step=lambda result: losses.append(result.loss))
    group.leave()
    return paths, losses
