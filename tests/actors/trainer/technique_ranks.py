"""One rank of the techniques' tests: several short runs in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytide.actors.trainer.distributed import local_shards, process_group
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model.loss import Micro
from raytide.actors.trainer.parallel.replica_check import weight_digest
from raytide.actors.trainer.trainer import Trainer
from raytide.actors.trainer.types import StopRequest
from raytide.core.specs.train import TrainSpec


@dataclass
class Run:
    losses: list[float]
    sent_bytes: int
    verdicts: list[str]
    loss_scales: list[float]
    micro_batch: int


def runs(specs: dict[str, TrainSpec], rank: int, world: int, meet: str) -> dict[str, Run]:
    """Each spec from its start, or its checkpoint, to its end."""
    out = {}
    for index, (name, spec) in enumerate(specs.items()):
        with joined(spec, rank, world, f"{meet}-{index}") as mine:
            trainer = Trainer(spec, mine)
            trainer.restore()
            out[name] = follow(trainer)
    return out


def overflow(spec: TrainSpec, rank: int, world: int, meet: str) -> tuple[Run, bool, Run]:
    """A run in which one rank's gradients overflow at the third of six steps, whether that step changed a weight, and
    the run that goes on from the checkpoint after the fourth."""
    with joined(spec, rank, world, meet + "a") as mine:
        trainer = Trainer(spec.model_copy(update={"steps": 4}), mine)
        step = trainer.compute.accumulate
        weights = list(trainer.model_parts[0].parameters())
        before: list[torch.Tensor] = []

        def poisoned(micros: list[Micro], factor: float) -> float:
            loss = step(micros, factor)
            if trainer.steps_done == 2:
                before.extend(local_shards.local(weight.detach()).clone() for weight in weights)
                if rank == world - 1:
                    grad = weights[-2].grad
                    assert grad is not None
                    local_shards.local(grad).fill_(torch.inf)
            return loss

        trainer.compute.accumulate = poisoned  # type: ignore[method-assign]
        unchanged: list[bool] = []

        def look() -> None:
            if trainer.steps_done == 3:
                now = [local_shards.local(weight.detach()) for weight in weights]
                unchanged.append(all(torch.equal(a, b) for a, b in zip(before, now, strict=True)))

        first = follow(trainer, look)
    with joined(spec, rank, world, meet + "b") as mine:
        trainer = Trainer(spec, mine)
        trainer.restore()
        return first, unchanged == [True], follow(trainer)


def went_on(
    specs: dict[str, TrainSpec], rank: int, world: int, meet: str
) -> dict[str, tuple[list[float], list[float]]]:
    """The losses after a checkpoint, in the run that wrote it and in the one that began with it."""
    out = {}
    for index, (name, spec) in enumerate(specs.items()):
        with joined(spec, rank, world, f"{meet}-{index}-a") as mine:
            trainer = Trainer(spec, mine)
            for _ in range(3):
                trainer.step()
            trainer.flush()
            first = losses(trainer, 3)
            trainer.close()
        with joined(spec, rank, world, f"{meet}-{index}-b") as mine:
            trainer = Trainer(spec, mine)
            trainer.restore()
            assert trainer.steps_done == 3
            out[name] = first, losses(trainer, 3)
            trainer.close()
    return out


@dataclass
class Paused:
    steps: int
    digest: int
    """The digest of the weights and of the optimizers' state."""


def paused(spec: TrainSpec, rank: int, world: int, meet: str) -> Paused:
    """A run that is asked to pause after six steps."""
    with joined(spec, rank, world, meet) as mine:
        trainer = Trainer(spec, mine)
        ended = trainer.run(
            on_step=lambda result: None,
            paused=lambda: StopRequest.SAVE if trainer.steps_done == 6 else StopRequest.NO,
        )
        assert not ended
        held = [shard.local.float() for shard in trainer.state.shards()]
        digest = int(weight_digest(held, mine.device))
        trainer.close()
        return Paused(trainer.steps_done, digest)


def losses(trainer: Trainer, steps: int) -> list[float]:
    results = [trainer.step() for _ in range(steps)]
    return [result.loss for result in results if result is not None]


def out_of_memory(spec: TrainSpec, rank: int, world: int, meet: str) -> str:
    """Returns the outcome of a step in which all ranks run out of memory."""
    with joined(spec, rank, world, meet) as mine:
        trainer = Trainer(spec, mine)
        layer = next(iter(trainer.model_parts[0].layers.values()))

        def full(*args: object) -> None:
            raise torch.OutOfMemoryError("injected")

        layer.register_forward_pre_hook(full)
        try:
            trainer.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def follow(trainer: Trainer, look: object = None) -> Run:
    losses, verdicts, scales = [], [], []

    def on_step(result: object) -> None:
        losses.append(result.loss)  # type: ignore[attr-defined]
        verdicts.append(result.verdict)  # type: ignore[attr-defined]
        scales.append(trainer.loss_scale.value)
        if callable(look):
            look()

    trainer.run(on_step=on_step)
    sent = 0 if trainer.all_reduce is None else trainer.all_reduce.sent_bytes
    return Run(losses, sent, verdicts, scales, trainer.micro_batch)


@contextmanager
def joined(spec: TrainSpec, rank: int, world: int, meet: str) -> Iterator[ProcessGroup]:
    yield process_group.join(dist.FileStore(meet, world), rank, spec.layout.sizes(world), timeout_s=30.0)
    process_group.leave()
