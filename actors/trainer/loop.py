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
from typing import Literal

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
from raytide.actors.trainer.snapshots import Snapshots
from raytide.actors.trainer.state import TrainState
from raytide.actors.trainer.timing import StepClock
from raytide.actors.trainer.validate import validate
from raytide.core.errors import CheckpointError, TrainError
from raytide.core.train_spec import TrainSpec

_ANY: Ids = np.zeros(1, dtype=np.int64)
"""The sequence that fills up a microbatch; it does not count."""


class Trainer:
    """The state of one run on one group. Every method is called by all ranks together."""

    def __init__(self, spec: TrainSpec, group: Group, snapshots: Snapshots | None = None) -> None:
        self.spec, self.group = spec, group
        self.data = open_data(spec)
        self.sampler = Sampler(spec.seed, self.data.n_sequences, spec.global_batch)
        self.origin = origin_of(spec, self.data)
        validate(spec.layout, self.origin.arch, spec)
        self.parts = parallel.build(spec, self.origin, group)
        """Of the model: what this rank has of it."""
        self.compute = compute.build(spec, self.parts, group)
        self.optimizer = optim.build(self.parts, spec.optim)
        self.guard = Guard(spec.guard)
        self.extras = {"guard": self.guard}
        """What else a checkpoint carries: each has state_dict and load_state_dict of small tensors."""
        self.state = TrainState(self.parts, optim.State(self.parts, self.optimizer), self.extras)
        digests = {"model, seed or batch": self.origin.digest, "dataset": self.data.digest}
        self.checkpoints = Checkpoints(spec, digests, group)
        self.snapshots = snapshots if spec.snapshot_every else None
        if self.snapshots is not None:
            self.snapshots.join(group)
        self.clock = StepClock(group.device)
        self.meter = Meter(spec, self.origin.arch, group)
        self.profiler = Profiler(spec.profile, spec.out, group.rank, group.device)
        self.steps_done = 0
        self.saved_at: int | None = None
        self.held_at: int | None = None
        """The step of the last snapshot."""
        self.restored_from: Literal["", "memory", "storage"] = ""
        self._asked = 0
        """To pause, by all ranks together, at the last step."""

    def restore(self) -> list[CheckpointError]:
        """Go to the newest state that is left, in the members' memory or on storage; returns the checkpoints that had
        to be passed over."""
        listing = self.checkpoints.look()
        in_memory = self.snapshots.newest() if self.snapshots is not None else 0
        if self.snapshots is not None and in_memory and in_memory >= listing.newest_step:
            self.snapshots.load(self.state)
            self.steps_done, self.restored_from = in_memory, "memory"
            self.saved_at = in_memory if in_memory == listing.newest_step else None
        elif (checkpoint := self.checkpoints.choose(listing)) is not None:
            self.checkpoints.load(self.state, checkpoint)
            self.steps_done, self.restored_from = checkpoint.manifest.step, "storage"
            self.saved_at = self.steps_done
        self.checkpoints.prepare(self.state)
        return listing.passed_over

    def save(self) -> None:
        """Begin to checkpoint the state as it is, unless that was done already."""
        if self.saved_at != self.steps_done:
            self.clock.start()
            self.checkpoints.save(self.state, self.steps_done)
            self.clock.lap("checkpoint")
            self.saved_at = self.steps_done

    @property
    def save_s(self) -> float:
        """What the last checkpoint took, from the copy to the manifest."""
        return self.checkpoints.save_s

    def hold(self) -> None:
        """Begin to give a copy of the state to another member's memory, unless that was done already."""
        if self.snapshots is not None and self.held_at != self.steps_done:
            self.snapshots.take(self.state, self.steps_done)
            self.held_at = self.steps_done

    def secure(self, *, save: bool = True) -> None:
        """Bring the state to safety and wait for that: into other members' memory, and onto storage too if `save` or if
        there is no other memory."""
        alone = self.snapshots is None or self.group.world == 1
        self.hold()
        if self.snapshots is not None:
            self.snapshots.wait()
        if save or alone:
            self.save()
            self.checkpoints.wait()

    def close(self) -> None:
        """Give up what is in flight. For this rank alone, and quick: the generation may be broken."""
        self.checkpoints.close()
        if self.snapshots is not None:
            self.snapshots.close()

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
                self.secure(save=self._asked >= Pause.SAVE)
                return False
            on_step(result)
            if result.verdict == "stopped":
                self.checkpoints.wait()
                raise guard.stopped(self.spec.name, result)
            if self.steps_done % self.spec.checkpoint_every == 0:
                self.save()
            if self.group.world > 1 and self.spec.snapshot_every and self.steps_done % self.spec.snapshot_every == 0:
                self.hold()
        self.save()
        self.checkpoints.wait()
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
        flags = [pause, self.profiler.asked(), self.checkpoints.failed]
        tokens, asked, profiled, failed = self.group.sum([counted, *flags])
        self.clock.lap("wait")
        if failed:
            self.checkpoints.wait()  # it raises, on every rank
        self._asked = int(asked)
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
        self.checkpoints.before_update()
        if self.snapshots is not None:
            self.snapshots.before_update()
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
