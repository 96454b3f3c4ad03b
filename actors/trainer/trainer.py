"""The training loop: one step is all microbatches, one clip, one update, and nothing is logged before it happened.

A Trainer lives as long as its group: when the gang changes, a new one is built and loads the latest checkpoint. What a
step does depends on (spec, step) alone; the group decides only who computes which part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from raytide.actors.trainer.checkpoint.manager import CheckpointManager
from raytide.actors.trainer.checkpoint.peers.snapshot import Snapshots
from raytide.actors.trainer.checkpoint.train_state import Stateful, TrainState
from raytide.actors.trainer.data.dataloader import DataLoader
from raytide.actors.trainer.data.token_dataset import Ids, Sampler
from raytide.actors.trainer.distributed import local_shards
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.hf.export import export
from raytide.actors.trainer.hf.model_source import open_data, resolve_model
from raytide.actors.trainer.model import activation_offload, apply
from raytide.actors.trainer.model.precision import GradScaler
from raytide.actors.trainer.optim import anomaly_guard, registry
from raytide.actors.trainer.optim.anomaly_guard import AnomalyGuard, Verdict
from raytide.actors.trainer.optim.lr_schedule import lr_at
from raytide.actors.trainer.parallel import (
    forward_backward,
    gradient_compression,
    micro_batch,
    parallelize,
    replica_check,
)
from raytide.actors.trainer.parallel import grad_norm as gradients
from raytide.actors.trainer.parallel.validate import validate
from raytide.actors.trainer.run_log.line_file import LineFile
from raytide.actors.trainer.run_log.mfu import MfuMeter
from raytide.actors.trainer.run_log.profiler import Profiler
from raytide.actors.trainer.run_log.step_timer import StepTimer
from raytide.actors.trainer.types import StepResult, StopRequest, halve_micro_batch
from raytide.core.errors import CheckpointError, StorageError, TrainError
from raytide.core.io.claim import committing
from raytide.core.specs.train import TrainSpec


class Trainer:
    """The state of one run on one group. Every method is called by all ranks together."""

    def __init__(
        self, spec: TrainSpec, group: ProcessGroup, snapshots: Snapshots | None = None, claim: str = ""
    ) -> None:
        """`claim`: the token of the run's claim on its folders; without one nothing is checked when it commits."""
        apply.check_supported(spec, group.device)
        self.spec, self.group = spec, group
        self.data = group.together(lambda: open_data(spec))
        self.sampler = Sampler(spec.seed, self.data.n_sequences, spec.global_batch)
        self.origin = resolve_model(spec, self.data)
        validate(spec.layout, self.origin.arch, spec)
        self.micro_batch = spec.first_micro_batch(group.sizes)
        """Sequences at once; it shrinks when memory runs out."""
        self.loss_scale = GradScaler(spec.precision)
        self._pool = activation_offload.pool(spec.memory)
        self._batches = DataLoader(self.data, self.sampler, group, spec)
        self._copies = 1 if spec.memory.compression == "none" else group.sizes.replicate
        """Of each gradient, that no DTensor knows of: replicas that reduce by themselves are not on its mesh."""
        self._applying = False
        self.guard = AnomalyGuard(spec.guard)
        self.extras: dict[str, Stateful] = {"guard": self.guard, "loss_scale": self.loss_scale}
        """What else a checkpoint carries: each has state_dict and load_state_dict of small tensors."""
        self._build()
        self.average = gradient_compression.average(spec.memory, group.replicas, self._trained())
        if self.average is not None:  # another layout, another gradient to leave something out of
            self.extras[f"left_out.{'x'.join(map(str, group.sizes.shape))}.{group.rank}"] = self.average
        digests = {"model, seed or batch": self.origin.digest, "dataset": self.data.digest}
        self._commit = partial(committing, spec.places, claim)
        self.checkpoints = CheckpointManager(spec, digests, group, self._commit)
        self.snapshots = snapshots if spec.snapshot_every else None
        if self.snapshots is not None:
            self.snapshots.join(group)
        self.clock = StepTimer(group.device)
        self.meter = MfuMeter(spec, self.origin.arch, group)
        self.profiler = Profiler(spec.profile, spec.out, group.rank, group.device)
        self.steps_done = 0
        self.saved_at: int | None = 0
        """The first state needs no copy: the seed makes it again."""
        self.unsaved = ""
        """Why the last checkpoint could not be written, until a later one could."""
        self._compared_at = 0
        """The step after which the replicas were last compared."""
        self.held_at = 0
        """The step of the last snapshot."""
        self.restored_from: Literal["", "memory", "storage"] = ""
        self._samples = LineFile(Path(spec.out) / "samples" / f"{group.rank}.jsonl")
        self._asked = 0
        """To pause, by all ranks together, at the last step."""

    def _build(self) -> None:
        self.parts = parallelize.build_model_parts(self.spec, self.origin, self.group, self._pool)
        """Of the model: what this rank has of it."""
        spec = self.spec.model_copy(update={"micro_batch": self.micro_batch})
        self.compute = forward_backward.build(spec, self.parts, self.group)
        named = [named for part in self.parts for named in part.named_parameters()]
        self.optimizer = registry.build(named, self.spec.optim, self.spec.memory)
        self._weights = [weight for _, weight in named]
        """Before the first step, like the state's: see TrainState."""
        self.state = TrainState(self.parts, self.optimizer, self.extras)

    def _trained(self) -> list[tuple[str, Tensor]]:
        """What this rank has of each weight that gets a gradient."""
        named = [named for part in self.parts for named in part.named_parameters()]
        return [(name, local_shards.local(weight)) for name, weight in named if weight.requires_grad]

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
            self.settle_save()
            self._compare_replicas()
            self.checkpoints.save(self.state, self.steps_done)
            self.clock.lap("checkpoint")
            self.saved_at = self.steps_done

    def settle_save(self) -> None:
        """Wait for the save in flight. One that the storage refused (a full disk, a lost bucket) is no reason to stop:
        the checkpoint before it is whole, and the next interval tries again. All ranks see the same outcome."""
        try:
            if self.checkpoints.wait():
                self.unsaved = ""
        except StorageError as error:
            self.unsaved, self.saved_at = str(error), None

    @property
    def save_s(self) -> float:
        """What the last checkpoint took, from the copy to the manifest."""
        return self.checkpoints.save_s

    def take_snapshot(self) -> None:
        """Begin to give a copy of the state to another member's memory, unless that was done already."""
        if self.snapshots is not None and self.held_at != self.steps_done:
            self.snapshots.take(self.state, self.steps_done)
            self.held_at = self.steps_done

    def flush(self, *, save: bool = True) -> None:
        """Bring the state to safety and wait for that: into other members' memory, and onto storage too if `save` or if
        there is no other memory."""
        alone = self.snapshots is None or self.group.world == 1
        self.take_snapshot()
        if self.snapshots is not None:
            self.snapshots.wait()
        if not (save or alone):
            return
        self.save()
        if alone:
            self.checkpoints.wait()
        else:
            self.settle_save()  # the others' memory has the state

    def close(self) -> None:
        """Give up what is in flight. For this rank alone, and quick: the generation may be broken."""
        self.checkpoints.close()
        if self.snapshots is not None:
            self.snapshots.close()
        if self._pool is not None:
            self._pool.close()

    def export(self) -> str:
        return export(self.parts, self.spec, self.origin, self.data, self.group, self._commit)

    def run(
        self, *, on_step: Callable[[StepResult], None], paused: Callable[[], StopRequest] = lambda: StopRequest.NO
    ) -> bool:
        """Train to the end, saving as the spec says; False when some rank asked to pause: the state is saved then.

        TrainError when the guard stops the run: the weights are then still those of the step before.
        """
        try:
            return self._run(on_step, paused)
        finally:
            self.profiler.close(self.steps_done)

    def _run(self, on_step: Callable[[StepResult], None], paused: Callable[[], StopRequest]) -> bool:
        while self.steps_done < self.spec.steps:
            result = self.step(pause=paused())
            if result is None:
                self.flush(save=self._asked >= StopRequest.SAVE)
                return False
            on_step(result)
            if result.verdict == "stopped":
                self.settle_save()
                raise anomaly_guard.stopped(self.spec.name, result)
            if self.steps_done % self.spec.checkpoint_every == 0:
                self.save()
            if self.group.world > 1 and self.spec.snapshot_every and self.steps_done % self.spec.snapshot_every == 0:
                self.take_snapshot()
        self.save()
        self.checkpoints.wait()
        if self.spec.export:
            self.export()
        return True

    def step(self, *, pause: StopRequest = StopRequest.NO) -> StepResult | None:
        """One optimiser step over the global batch; None, with nothing done, when any rank asks to pause.

        A batch that the guard objects to is not applied; the result says so, and why. torch.OutOfMemoryError in a gang,
        which then forms again with smaller microbatches; alone, that is done here.
        """
        while True:
            try:
                return self._step(pause)
            except (RuntimeError, MemoryError) as error:
                if not micro_batch.is_out_of_memory(error) or self._applying or self.group.world > 1:
                    raise
            self.micro_batch = halve_micro_batch(self.micro_batch, self.spec.name)
            self._rebuild()  # out of the handler, which holds the frames that hold the graph

    def _compare_replicas(self) -> None:
        """Unless that was done at this step, or not at all."""
        if self.spec.replica_check_every and self._compared_at != self.steps_done:
            self._compared_at = self.steps_done
            replica_check.check(self._weights, self.group, self.spec.name, self.steps_done)

    def _before_update(self) -> None:
        """Copies of the weights may still be under way."""
        self.checkpoints.before_update()
        if self.snapshots is not None:
            self.snapshots.before_update()

    def _rebuild(self) -> None:
        """The same state in a new model: a backward pass that broke off leaves FSDP's own state in the middle of it."""
        self._before_update()
        saved = micro_batch.offload_state(self.parts, self.optimizer)
        self.parts.clear()
        del self.optimizer, self.state, self.compute, self._weights
        self._build()
        micro_batch.restore_state(self.parts, self.optimizer, saved)

    def _step(self, pause: StopRequest) -> StepResult | None:
        began = time.perf_counter()
        self.clock.start()
        spec, step = self.spec, self.steps_done
        ids, micros, counted = self._batches.next_batch(step, self.micro_batch)
        self._record(step, ids)
        data_s = time.perf_counter() - began
        self.clock.lap("data")
        counted = counted if self.group.is_data_first else 0
        flags = [pause, self.profiler.asked(), self.checkpoints.failed]
        tokens, asked, profiled, failed = self.group.sum([counted, *flags])
        self.clock.lap("wait")
        if failed:
            self.settle_save()
        self._asked = int(asked)
        if asked:
            return None
        if not tokens:
            raise TrainError(
                f"step {step} of {spec.name} has no token to learn: all its answers begin beyond seq_len.",
                hint="Raise seq_len, or global_batch.",
            )
        self.profiler.begin(step + 1, int(profiled))
        local = self.compute.accumulate(micros, self.loss_scale.value / tokens)
        self.clock.lap("forward_backward")
        self._reduce()
        self.clock.lap("reduce")
        loss, squares = self.group.sum([local, gradients.square_sum(self.parts) / self._copies])
        loss, grad_norm = loss / tokens, math.sqrt(squares)
        self.clock.lap("norm")
        lr = lr_at(step - self.guard.skipped, spec.steps, spec.optim)
        verdict = self._judge(loss, grad_norm)
        if verdict.kind == "applied":
            gradients.clip(self.parts, grad_norm, spec.optim.clip)
            self.clock.lap("clip")
            self._update(lr)
            self.clock.lap("optimizer")
        elif self.average is not None:
            self.average.forget()
        self.optimizer.zero_grad()
        self.steps_done += verdict.kind != "stopped"
        if self.spec.replica_check_every and self.steps_done % self.spec.replica_check_every == 0:
            self._compare_replicas()
            self.clock.lap("replicas")
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
            micro_batch=self.micro_batch,
            unsaved="" if self.checkpoints.saved else self.unsaved,
        )

    def _reduce(self) -> None:
        """Take the loss scale back out of the gradients, and average them over replicas that do so themselves."""
        named = [named for part in self.parts for named in part.named_parameters()]
        grads = [(name, local_shards.local(weight.grad)) for name, weight in named if weight.grad is not None]
        self.loss_scale.unscale([grad for _, grad in grads])
        if self.average is not None:
            self.average(grads)

    def _judge(self, loss: float, grad_norm: float) -> Verdict:
        """An overflow in fp16 is no anomaly of the batch: the loss scale's own affair."""
        if not self.loss_scale.overflowed(loss, grad_norm):
            return self.guard.judge(loss, grad_norm)
        why = f"gradients overflowed in fp16 at a loss scale of {self.loss_scale.value:g}"
        self.loss_scale.bad(self.steps_done)
        self.guard.record_skip()
        return Verdict("skipped", why)

    def _update(self, lr: float) -> None:
        self._before_update()
        self._applying = True
        self.optimizer.set_lr(lr)
        self.optimizer.step()
        self.loss_scale.good()
        self._applying = False

    def _record(self, step: int, ids: Ids) -> None:
        if self.spec.record_samples and self.group.is_data_first:
            self._samples.add({"step": step + 1, "generation": self.group.generation, "ids": ids.tolist()})
