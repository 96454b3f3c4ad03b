"""The work of ranks in the tests of models. A module by name, since their processes import it."""

from __future__ import annotations

import torch.distributed as dist

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.train import TrainSpec


def export_and_tune(
    exported: list[TrainSpec], tuned: list[TrainSpec], rank: int, world: int, meet: str
) -> list[list[float]]:
    """Exports the models of `exported` as they start, then gives this rank's losses over each of `tuned`."""
    curves: list[list[float]] = [[] for _ in tuned]
    for number, spec in enumerate([*exported, *tuned]):
        sizes = spec.layout.sizes(world)
        if rank >= sizes.world:
            continue
        mine = process_group.join(dist.FileStore(f"{meet}-{number}", sizes.world), rank, sizes, timeout_s=30.0)
        trainer = Trainer(spec, mine)
        if number < len(exported):
            trainer.export()
        else:
            results = [trainer.step() for _ in range(spec.steps)]
            curves[number - len(exported)] += [result.loss for result in results if result is not None]
        process_group.leave()
    return curves
