"""The training loop: one step is all microbatches, one clip, one update, and nothing is logged before it happened.

A Trainer lives as long as its group: when the gang changes, a new one is built and loads the latest checkpoint. What a
step does depends on (spec, step) alone; the group decides only who computes which part.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from raytide.actors.trainer import compute, gradients, guard, optim, parallel
from raytide.actors.trainer.checkpoint import Checkpoints
from raytide.actors.trainer.core import Pause, StepResult
from raytide.actors.trainer.data import Ids, Sampler, share
from raytide.actors.trainer.export import export
from raytide.actors.trainer.group import Group
from raytide.actors.trainer.guard import Guard
from raytide.actors.trainer.loss import IGNORE
from raytide.actors.trainer.metrics import Meter
from raytide.actors.trainer.origin import open_data, origin_of
from raytide.actors.trainer.profile import Profiler
from raytide.actors.trainer.timing import StepClock
from raytide.actors.trainer.validate import validate
from raytide.core.errors import CheckpointError, TrainError
from raytide.core.train_spec import TrainSpec

_ANY: Ids = np.zeros(1, dtype=np.int64)
"""The sequence that fills up a microbatch; it does not count."""


class Trainer:
    """The state of one run on one group. Every method is called by all ranks together."""

    def __init__(self, spec: TrainSpec, group: Group) -> None:
        self.spec, self.group = spec, group
        self.data = open_data(spec)
        self.sampler = Sampler(spec.seed, self.data.n_sequences, spec.global_batch)
        self.origin = origin_of(spec, self.data)
        validate(spec.layout, self.origin.arch, spec)
        self.parts = parallel.build(spec, self.origin, group)
        """Of the model: what this rank has of it."""
        self.compute = compute.build(spec, self.parts, group)
        self.optimizer = optim.build(self.parts, spec.optim)
        self.checkpoints = Checkpoints(spec, self.origin.digest, self.data.digest, group)
        self.guard = Guard(spec.guard)
        self.extras = {"guard": self.guard}
        """What else a checkpoint carries: each has state_dict and load_state_dict of small tensors."""
        self.clock = StepClock(group.device)
        self.meter = Meter(spec, self.origin.arch, group)
        self.profiler = Profiler(spec.profile, spec.out, group.rank, group.device)
        self.steps_done = 0
        self.saved_at: int | None = None
        self.restored_from = ""
        """"storage", or nothing when this is the run's first step."""
        self.save_s = 0.0
        """Of the last checkpoint."""

    def restore(self) -> list[CheckpointError]:
        """Go to the newest good checkpoint; returns the ones that had to be passed over."""
        step, rejected = self.checkpoints.load(self.parts, self.optimizer)
        self.steps_done = step
        self.saved_at = step or None
        self.restored_from = "storage" if step else ""
        return rejected

    def save(self) -> None:
        """Checkpoint the state as it is, unless that was done already."""
        if self.saved_at != self.steps_done:
            began = time.perf_counter()
            self.clock.start()
            self.checkpoints.save(self.parts, self.optimizer, self.steps_done)
            self.clock.lap("checkpoint")
            self.saved_at = self.steps_done
            self.save_s = time.perf_counter() - began

    def export(self) -> str:
        return export(self.parts, self.spec, self.origin, self.data, self.group)

    def run(self, *, on_step: Callable[[StepResult], None], paused: Callable[[], Pause] = lambda: Pause.NO) -> bool:
        """Train to the end, saving as the spec says; False when some rank asked to pause: the state is saved then.

        TrainError when the guard stops the run: the weights are then still those of the step before.
        """
        try:
            return self._run(on_step, paused)
        finally:
            self.profiler.close(self.steps_done)

    def _run(self, on_step: Callable[[StepResult], None], paused: Callable[[], Pause]) -> bool:
        while self.steps_done < self.spec.steps:
            result = self.step(pause=paused())
            if result is None:
                self.save()
                return False
            on_step(result)
            if result.verdict == "stopped":
                raise guard.stopped(self.spec.name, result)
            if self.steps_done % self.spec.checkpoint_every == 0:
                self.save()
        self.save()
        if self.spec.export:
            self.export()
        return True

    def step(self, *, pause: Pause = Pause.NO) -> StepResult | None:
        """One optimiser step over the global batch; None, with nothing done, when any rank asks to pause.

        A batch that the guard objects to is not applied; the result says so, and why.
        """
        began = time.perf_counter()
        self.clock.start()
        spec, step = self.spec, self.steps_done
        micros = self._micro_batches(self._my_ids(step))
        data_s = time.perf_counter() - began
        self.clock.lap("data")
        counted = sum(int((y != IGNORE).sum()) for _, y in micros) if self.group.is_data_first else 0
        tokens, asked, profiled = self.group.sum([counted, pause, self.profiler.asked()])
        self.clock.lap("wait")
        if asked:
            return None
        if not tokens:
            raise TrainError(
                f"step {step} of {spec.name} has no token to learn: all its answers begin beyond seq_len.",
                hint="Raise seq_len, or global_batch.",
            )
        self.profiler.begin(step + 1, int(profiled))
        local = self.compute.accumulate(micros, 1 / tokens)
        self.clock.lap("forward_backward")
        loss, squares = self.group.sum([local, gradients.square_sum(self.parts)])
        loss, grad_norm = loss / tokens, math.sqrt(squares)
        self.clock.lap("norm")
        lr = optim.lr_at(step - self.guard.skipped, spec.steps, spec.optim)
        verdict = self.guard.judge(loss, grad_norm)
        if verdict.kind == "applied":
            gradients.clip(self.parts, grad_norm, spec.optim.clip)
            self.clock.lap("clip")
            self._update(lr)
            self.clock.lap("optimizer")
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += verdict.kind != "stopped"
        self.profiler.end(self.steps_done)
        step_s = time.perf_counter() - began
        return StepResult(
            step=step + 1,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=int(tokens),
            step_s=step_s,
            data_s=data_s,
            world=self.group.world,
            mfu=self.meter.mfu(int(tokens), step_s),
            memory_bytes=self.meter.memory_bytes(),
            times=self.clock.take(),
            verdict=verdict.kind,
            why=verdict.why,
            samples=() if verdict.kind == "applied" else tuple(self.sampler.ids(step).tolist()),
        )

    def _update(self, lr: float) -> None:
        optim.set_lr(self.optimizer, lr)
        self.optimizer.step()

    def _my_ids(self, step: int) -> Ids:
        ids = self.sampler.ids(step)[share(self.spec.global_batch, self.group.data_rank, self.group.sizes.data)]
        if self.spec.record_samples and self.group.is_data_first:
            path = Path(self.spec.out) / "samples" / f"{self.group.rank}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                line = {"step": step + 1, "generation": self.group.generation, "ids": ids.tolist()}
                file.write(json.dumps(line) + "\n")
        return ids

    def _micro_batches(self, ids: Ids) -> list[compute.Micro]:
        """This rank's microbatches. All ranks have equally many, or their collectives would not match: a rank whose
        share is smaller fills up with sequences that do not count. In a pipeline they also have one shape."""
        rows = math.ceil(self.spec.global_batch / self.group.sizes.data)
        count, size = self.spec.layout.microbatches(rows, self.spec.micro_batch)
        out = []
        for index in range(count):
            chunk = ids[index * size : (index + 1) * size]
            wanted = size if self.group.sizes.pipeline > 1 else max(1, len(chunk))
            filled = np.concatenate((chunk, np.repeat(_ANY, wanted - len(chunk))))
            inputs, targets = (torch.from_numpy(each).to(self.group.device) for each in self.data.examples(filled))
            if wanted > len(chunk):
                targets = targets.clone()
                targets[len(chunk) :] = IGNORE
            out.append((inputs, targets))
        return out
