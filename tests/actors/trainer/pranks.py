"""Faults inside a worker, at a step of the test's choice. By name and picklable: its process imports this."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from raytide.actors.trainer import trainer as trainer_module
from raytide.actors.trainer.data.token_dataset import TokenData
from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.model.transformer import Transformer, TransformerBlock
from raytide.actors.trainer.run_log.folder import RunFolder
from raytide.actors.trainer.trainer import Trainer

_now = {"step": 0}


@dataclass(frozen=True)
class SleepsInStep:
    step: int

    def __call__(self) -> None:
        _follow_steps()
        forward = Transformer.forward

        def sleeps_here(self_: Transformer, *args: Any, **options: Any) -> Any:
            if _now["step"] == self.step:
                time.sleep(3600)
            return forward(self_, *args, **options)

        Transformer.forward = sleeps_here  # type: ignore[method-assign]


@dataclass(frozen=True)
class HoldsBefore:
    """Waits before each of these steps until the test has opened it, so that a test's next act finds the run before
    that step, however late it comes.
    """

    folder: Path
    steps: tuple[int, ...]

    def __call__(self) -> None:
        step = Trainer.step

        def held(self_: Trainer, *args: Any, **options: Any) -> Any:
            following = self_.steps_done + 1
            while following in self.steps and not (self.folder / f"opened-{following}").exists():
                time.sleep(0.005)
            return step(self_, *args, **options)

        Trainer.step = held  # type: ignore[method-assign]

    def open(self, step: int) -> None:
        (self.folder / f"opened-{step}").touch()


@dataclass(frozen=True)
class SlowInSteps:
    seconds: float
    at: Literal["forward", "data"]

    def __call__(self) -> None:
        owner: Any = TransformerBlock if self.at == "forward" else TokenData
        name = "forward" if self.at == "forward" else "batch"
        work = getattr(owner, name)

        def is_slow(self_: Any, *args: Any, **options: Any) -> Any:
            time.sleep(self.seconds)
            return work(self_, *args, **options)

        setattr(owner, name, is_slow)


@dataclass(frozen=True)
class StuckInRead:
    step: int

    def __call__(self) -> None:
        _follow_steps()
        batch = TokenData.batch

        def never_reads(self_: TokenData, ids: Any) -> Any:
            if _now["step"] == self.step:
                os.read(os.pipe()[0], 1)
            return batch(self_, ids)

        TokenData.batch = never_reads  # type: ignore[method-assign]


@dataclass(frozen=True)
class DiesInStep:
    step: int

    def __call__(self) -> None:
        _follow_steps()
        forward = Transformer.forward

        def dies_here(self_: Transformer, *args: Any, **options: Any) -> Any:
            if _now["step"] == self.step:
                os._exit(1)
            return forward(self_, *args, **options)

        Transformer.forward = dies_here  # type: ignore[method-assign]


@dataclass(frozen=True)
class HasRoomFor:
    sequences: int

    def __call__(self) -> None:
        forward = Transformer.forward

        def is_full(self_: Transformer, inputs: torch.Tensor, *args: Any, **options: Any) -> Any:
            if len(inputs) > self.sequences:
                raise torch.OutOfMemoryError("no room (the test's)")
            return forward(self_, inputs, *args, **options)

        Transformer.forward = is_full  # type: ignore[method-assign]


def _follow_steps() -> None:
    step = Trainer.step

    def followed(self: Trainer, *args: Any, **options: Any) -> Any:
        _now["step"] = self.steps_done + 1
        return step(self, *args, **options)

    Trainer.step = followed  # type: ignore[method-assign]


@dataclass(frozen=True)
class DiesInBuild:
    """Dies once the others have built their parts and wait for this rank."""

    def __call__(self) -> None:
        def dies_here(self_: Trainer) -> None:
            time.sleep(3.0)
            os._exit(1)

        Trainer._build = dies_here  # type: ignore[method-assign]


@dataclass(frozen=True)
class SlowFiles:
    """A node that takes longer to copy its data, and to fetch the log, than ranks wait for each other in a step. The
    least timeout of the groups for files is short here.
    """

    data_s: float = 0.0
    log_s: float = 0.0

    def __call__(self) -> None:
        process_group.IO_TIMEOUT_S = 0.1
        opened, fetch = trainer_module.open_data, RunFolder.fetch

        def copies(spec: Any) -> Any:
            time.sleep(self.data_s)
            return opened(spec)

        def slow(self_: RunFolder, name: str) -> Any:
            if name == "metrics.jsonl":
                time.sleep(self.log_s)
            return fetch(self_, name)

        trainer_module.open_data = copies
        RunFolder.fetch = slow  # type: ignore[method-assign]
