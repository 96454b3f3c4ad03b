"""The training loop. A step runs all microbatches, clips once and updates once. It is logged only after the update.

A Trainer lives as long as its process group. When the gang changes, a new Trainer is built and loads the latest state.
The data and the update of a step depend only on (spec, step). The process group only determines which rank computes
which part."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from raytide.actors.trainer.checkpoint.manager import CheckpointManager, UnsavedNotice
from raytide.actors.trainer.checkpoint.peers.snapshot import Snapshots
from raytide.actors.trainer.checkpoint.train_state import Stateful, TrainState
from raytide.actors.trainer.data.dataloader import DataLoader
from raytide.actors.trainer.data.mixture_dataset import create_sampler
from raytide.actors.trainer.distributed import local_shards
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.hf.export import export
from raytide.actors.trainer.hf.model_source import open_data, resolve_model
from raytide.actors.trainer.model import activation_offload, apply, fake_quantize
from raytide.actors.trainer.model.precision import GradScaler
from raytide.actors.trainer.optim import anomaly_guard, registry
from raytide.actors.trainer.optim.anomaly_guard import AnomalyGuard, GuardVerdict
from raytide.actors.trainer.optim.lr_schedule import lr_at
from raytide.actors.trainer.optim.outer import OuterOptimizer
from raytide.actors.trainer.parallel import (
    forward_backward,
    gradient_compression,
    micro_batch,
    parallelize,
    replica_check,
)
from raytide.actors.trainer.parallel import grad_norm as gradients
from raytide.actors.trainer.parallel.evaluation import EarlyStop, Evaluator
from raytide.actors.trainer.parallel.validate import validate
from raytide.actors.trainer.run_log.folder import RunFolder
from raytide.actors.trainer.run_log.mfu import MfuMeter
from raytide.actors.trainer.run_log.profiler import Profiler
from raytide.actors.trainer.run_log.step_timer import StepTimer
from raytide.actors.trainer.run_log.writer import SampleLog
from raytide.actors.trainer.types import MicroBatchLimit, StepResult, StopRequest
from raytide.core.errors import CheckpointError, StorageError, TrainError
from raytide.core.io.claim import committing
from raytide.core.specs.train import TrainSpec

T = TypeVar("T")


class Trainer:
    """The state of one run on one process group. All ranks must call its methods together, except `close`."""

    def __init__(
        self, spec: TrainSpec, group: ProcessGroup, snapshots: Snapshots | None = None, claim: str = ""
    ) -> None:
        """`claim` is the token of the run's claim on its folders; without one, commits are not checked."""
        apply.check_supported(spec, group.device)
        self.spec, self.group = spec, group
        self.data = group.run_on_all(lambda: open_data(spec))
        self.sampler = create_sampler(spec, self.data)
        self.model_source = origin = resolve_model(spec, self.data)
        validate(spec.layout, origin.arch, spec)
        self.micro_batch = spec.first_micro_batch(group.sizes)
        """The number of sequences in a microbatch."""
        self._limit = MicroBatchLimit(spec.name)
        self.loss_scale = GradScaler(spec.precision)
        self._pool = activation_offload.create_pool(spec.memory)
        self._loader = DataLoader(self.data, self.sampler, group, spec, origin.arch.vocab_size)
        self._gradient_copies = group.sizes.replicate if spec.replicas_reduce_themselves else 1
        """The number of copies of each gradient outside of DTensor's mesh. The copies are equal if replicas compress
        them; if replicas train independently, the norm is the root mean square of theirs."""
        self.early_stop = EarlyStop(spec.eval)
        self._evaluator = None if spec.eval is None else Evaluator(spec, spec.eval, group, self.data, origin.arch)
        self._applying = False
        self.guard = AnomalyGuard(spec.guard)
        self.stateful: dict[str, Stateful] = {"guard": self.guard, "loss_scale": self.loss_scale}
        """Objects whose state is also in checkpoints, as small tensors."""
        if spec.eval is not None:
            self.stateful["early_stop"] = self.early_stop
        self._build()
        self.all_reduce = gradient_compression.create_all_reduce(spec.memory, group.replicas, self.model_parts)
        if self.all_reduce is not None:  # the error feedback belongs to one layout
            self.stateful[f"left_out.{'x'.join(map(str, group.sizes.shape))}.{group.rank}"] = self.all_reduce
        self.outer = self._build_outer()
        digests = {"model, seed or batch": self.model_source.digest, "dataset": self.data.digest}
        self._commit = partial(committing, spec.places, claim)
        self.checkpoints = CheckpointManager(spec, digests, group, self._commit, self.model_source.earlier_digests)
        self.snapshots = snapshots if spec.takes_snapshots else None
        if self.snapshots is not None:
            self.snapshots.join(group, digests)
        self.timer = StepTimer(group.device)
        self.meter = MfuMeter(spec, self.model_source.arch, group)
        self.folder = RunFolder(spec.out, self._commit)
        """This rank's files of the run beside its checkpoints."""
        self._samples = SampleLog(self.folder, group) if spec.record_samples and group.is_data_first else None
        self.profiler = Profiler(spec.profile, self.folder, group.rank, group.device)
        self.steps_done = 0
        self.saved_step: int | None = 0
        """Step of the last checkpoint, also one in progress; None if it failed. 0 needs none: the seed gives it."""
        self._unsaved = UnsavedNotice()
        self._compared_step = self._met_step = 0
        """Steps after which the replicas were last compared, and last met."""
        self.snapshot_step = 0
        """Step of the last snapshot."""
        self._step_s = 0.0
        self.restored_from: Literal["", "memory", "storage"] = ""
        self._stop_request = 0
        """The StopRequest at the last step, summed over the ranks. The driver sends it to rank 0 only."""

    def _build(self) -> None:
        self.model_parts = parallelize.build_model_parts(self.spec, self.model_source, self.group, self._pool)
        """The parts of the model that this rank holds."""
        spec = self.spec.model_copy(update={"micro_batch": self.micro_batch})
        self.compute = forward_backward.build(spec, self.model_parts, self.group)
        named = [named for part in self.model_parts for named in part.named_parameters()]
        self.optimizer = registry.build(named, self.spec.optim, self.spec.memory)
        self._weights = [weight for _, weight in named]
        """The weights, collected before the first step (see TrainState)."""
        self.state = TrainState(self.model_parts, self.optimizer, self.stateful)

    def _build_outer(self) -> OuterOptimizer | None:
        """Returns the outer optimizer, whose state becomes part of the run's; None unless replicas train apart."""
        if self.spec.optim.outer is None:
            return None
        outer = OuterOptimizer(self.optimizer, self.spec.optim.outer, self.group.replicas, self.all_reduce)
        self.state = TrainState(self.model_parts, outer, self.stateful)
        return outer

    def restore(self) -> list[CheckpointError]:
        """Loads the newest state from members' memory or from storage. Returns the errors of rejected checkpoints."""
        listing = self.checkpoints.list_checkpoints()
        in_memory = self.snapshots.find_newest() if self.snapshots is not None else 0
        if (checkpoint := self.checkpoints.select(listing, in_memory)) is not None:
            self.checkpoints.load(self.state, checkpoint)
            self.steps_done, self.restored_from = checkpoint.manifest.step, "storage"
            self.saved_step = self.steps_done
        elif self.snapshots is not None and in_memory:
            self.snapshots.load(self.state)
            self.steps_done, self.restored_from = in_memory, "memory"
            self.saved_step = in_memory if in_memory == listing.newest_step else None
        self._met_step = self.steps_done
        self.checkpoints.prepare(self.state)
        return listing.rejected

    def save(self) -> None:
        """Starts to write a checkpoint of the current state, unless the state is saved already."""
        if self.saved_step != self.steps_done:
            self.timer.start()
            self.wait_for_save()
            self._compare_replicas()
            self.checkpoints.save(self.state, self.steps_done)
            self.timer.lap("checkpoint")
            self.saved_step = self.steps_done

    def wait_for_save(self) -> None:
        """Waits for the save in flight. All ranks see the same outcome. A failed save (full disk, unreachable bucket)
        does not end the run. The previous checkpoint is intact, and the next checkpoint interval tries again."""
        try:
            if self.checkpoints.wait():
                self._unsaved.end()
        except StorageError as error:
            self._unsaved.fail(str(error))
            self.saved_step = None

    def take_snapshot(self) -> None:
        """Starts to copy the state into a peer's memory, unless the peer has this state already."""
        if self.snapshots is not None and self.snapshot_step != self.steps_done:
            self.snapshots.save(self.state, self.steps_done)
            self.snapshot_step = self.steps_done

    def flush(self, *, save: bool = True) -> None:
        """Copies the state to peers' memory and waits for the copy. With `save`, or if there is no peer, also saves the
        state to storage.
        """
        alone = self.snapshots is None or self.group.world == 1
        self.take_snapshot()
        if self.snapshots is not None:
            self.snapshots.wait()
        if not (save or alone):
            return
        self.save()
        if self.snapshots is None:
            self.checkpoints.wait()
        else:
            self.wait_for_save()  # this process or its peers hold the state

    def close(self) -> None:
        """Abandons saves in flight. Returns quickly and does not communicate, because the generation may be broken."""
        self.checkpoints.close()
        if self.snapshots is not None:
            self.snapshots.close()
        if self._pool is not None:
            self._pool.close()
        self.folder.close()

    def export(self) -> str:
        return export(self.model_parts, self.spec, self.model_source, self.data, self.group, self._commit)

    def run(
        self, *, on_step: Callable[[StepResult], None], paused: Callable[[], StopRequest] = lambda: StopRequest.NO
    ) -> bool:
        """Trains to the end, saves as the spec requires, and exports the model if the spec asks for it. After a
        requested pause, calls `flush` (with `save` only if the request is SAVE) and returns False. Raises TrainError if
        the guard stops the run. The weights are then those before the rejected step.
        """
        try:
            return self._run(on_step, paused)
        finally:
            self.profiler.close(self.steps_done)

    def _run(self, on_step: Callable[[StepResult], None], paused: Callable[[], StopRequest]) -> bool:
        while self.steps_done < self.spec.steps and not self.early_stop.why:
            result = self.step(pause=paused())
            if result is None:
                self._meet()
                self.flush(save=self._stop_request >= StopRequest.SAVE)
                return False
            on_step(result)
            if result.verdict == "stopped":
                self.wait_for_save()
                raise anomaly_guard.stopped_error(self.spec.name, result)
            if self.spec.is_due(self.spec.checkpoint_every, self.steps_done):
                self.save()
            if self.snapshots is not None and self.snapshots.is_due(self.spec, self.steps_done, self.snapshot_step):
                self.take_snapshot()
        self._meet()  # a run that ends early may end between two meetings
        self.save()
        self.checkpoints.wait()
        if self.spec.export:
            self.export()
        return True

    def step(self, *, pause: StopRequest = StopRequest.NO) -> StepResult | None:
        """Runs one optimiser step over the global batch and returns its result. If any rank asks to stop, does nothing
        and returns None.

        A batch that the guard rejects is not applied, and the result gives the reason. If memory runs out, a gang
        raises torch.OutOfMemoryError and forms again with smaller microbatches. A single process retries with them."""
        result = self._retry_out_of_memory(lambda: self._step(pause))
        self._limit.record_steps(1)
        first = self.spec.first_micro_batch(self.group.sizes)
        if self.group.world == 1 and self._limit.grow(first, 1):
            self.micro_batch = self._limit.bound(first)
        return result

    def _retry_out_of_memory(self, call: Callable[[], T]) -> T:
        """Returns the result of `call`. A single process that runs out of memory calls it with smaller microbatches."""
        while True:
            try:
                return call()
            except (RuntimeError, MemoryError) as error:
                if not micro_batch.is_out_of_memory(error) or self._applying or self.group.world > 1:
                    raise
            self.micro_batch = self._limit.halve(self.micro_batch, 1)
            self._rebuild()  # outside the handler, whose traceback keeps the graph alive

    def _compare_replicas(self) -> None:
        """Compares the weights of replicas, unless that is disabled or already done at this step."""
        if self.spec.replica_check_every and self._compared_step != self.steps_done:
            self._compared_step = self.steps_done
            replica_check.check(self._weights, self.group, self.spec.name, self.steps_done)

    def _before_update(self) -> None:
        """Waits for copies of the weights that are still being made."""
        self.checkpoints.before_update()
        if self.snapshots is not None:
            self.snapshots.before_update()

    def _rebuild(self) -> None:
        """Moves the state into a new model: an interrupted backward pass leaves FSDP's internal state inconsistent."""
        self._before_update()
        saved = micro_batch.offload_state(self.model_parts, self.optimizer)
        self.model_parts.clear()
        del self.optimizer, self.state, self.compute, self._weights
        self._build()
        micro_batch.restore_state(self.model_parts, self.optimizer, saved)

    def _step(self, pause: StopRequest) -> StepResult | None:
        began = time.perf_counter()
        self.timer.start()
        spec, step = self.spec, self.steps_done
        batch = self._loader.next_batch(step, self.micro_batch)
        if self._samples is not None:
            self._samples.add(step, batch.ids)
        data_s = time.perf_counter() - began
        self.timer.lap("data")
        counts = [batch.counted, batch.computed, batch.pairs] if self.group.is_data_first else [0, 0, 0]
        flags = [pause, self.profiler.requested_steps(), self.checkpoints.has_failed]
        figures = [] if self.snapshots is None else self.snapshots.figures(self._step_s)
        tokens, computed, pairs, stop, profiled, failed, *figures = self.group.sum([*counts, *flags, *figures])
        if self.snapshots is not None:
            self.snapshots.record(figures)
        self.timer.lap("wait")
        if failed:
            self.wait_for_save()
        self._stop_request = int(stop)
        if stop:
            return None
        if not tokens:
            raise TrainError(
                f"step {step} of {spec.name} has no token to train on: all answers start beyond seq_len.",
                hint="Raise seq_len, or global_batch.",
            )
        self.profiler.begin(step + 1, int(profiled))
        fake_quantize.activate(self.model_parts, spec.qat, step)
        local = self.compute.accumulate(batch.micros, self.loss_scale.value / tokens)
        self.timer.lap("forward_backward")
        self._reduce()
        self.timer.lap("reduce")
        loss, squares = self.group.sum([local, gradients.square_sum(self.model_parts) / self._gradient_copies])
        loss, grad_norm = loss / tokens, math.sqrt(squares)
        self.timer.lap("norm")
        lr = lr_at(step - self.guard.skipped, spec.steps, spec.optim)
        verdict = self._judge(loss, grad_norm)
        if verdict.kind == "applied":
            gradients.clip(self.model_parts, grad_norm, spec.optim.clip)
            self.timer.lap("clip")
            self._update(lr)
            self.timer.lap("optimizer")
        elif self.all_reduce is not None and self.outer is None:
            self.all_reduce.reset_errors()
        self.optimizer.zero_grad()
        self.steps_done += verdict.kind != "stopped"
        if spec.are_replicas_equal(self.steps_done):
            self._meet()
        if spec.is_due(spec.replica_check_every, self.steps_done):
            self._compare_replicas()
            self.timer.lap("replicas")
        self.profiler.end(self.steps_done)
        if self.checkpoints.has_saved:
            self._unsaved.end()
        step_s = self._step_s = time.perf_counter() - began
        eval_loss = self._retry_out_of_memory(self._evaluate) if verdict.kind != "stopped" else None
        return StepResult(
            step=step + 1,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=int(tokens),
            step_s=step_s,
            data_s=data_s,
            world=self.group.world,
            mfu=self.meter.mfu(int(computed), step_s, pairs / computed),
            memory_bytes=self.meter.memory_bytes(),
            gpu_bytes=self.meter.gpu_bytes(),
            times=self.timer.drain_times(),
            verdict=verdict.kind,
            why=verdict.why,
            samples=() if verdict.kind == "applied" else tuple(self.sampler.ids(step).tolist()),
            micro_batch=self.micro_batch,
            unsaved=self._unsaved.show(),
            eval_loss=eval_loss,
            early_end=self.early_stop.why,
        )

    def _evaluate(self) -> float | None:
        """Returns the held-out loss if an evaluation is due, else None. The step's duration does not include it."""
        if self._evaluator is None or not self._evaluator.is_due(self.steps_done):
            return None
        fake_quantize.activate(self.model_parts, self.spec.qat, self.steps_done - 1)  # they may be new
        loss = self._evaluator.loss(self.compute, self.micro_batch)
        self.early_stop.record(loss)
        self.timer.lap("eval")
        return loss

    def _reduce(self) -> None:
        """Unscales the gradients and, if replicas exchange them compressed, averages them over the replicas."""
        named = [named for part in self.model_parts for named in part.named_parameters()]
        grads = [(name, local_shards.local(weight.grad)) for name, weight in named if weight.grad is not None]
        self.loss_scale.unscale([grad for _, grad in grads])
        if self.all_reduce is not None and self.outer is None:
            self.all_reduce(grads)

    def _judge(self, loss: float, grad_norm: float) -> GuardVerdict:
        """Returns the guard's verdict. An fp16 overflow is no anomaly: it skips the step and halves the loss scale."""
        if not self.loss_scale.overflowed(loss, grad_norm):
            return self.guard.judge(loss, grad_norm)
        why = f"gradients overflowed in fp16 at a loss scale of {self.loss_scale.value:g}"
        self.loss_scale.record_overflow(self.steps_done)
        self.guard.record_skip()
        return GuardVerdict("skipped", why)

    def _update(self, lr: float) -> None:
        self._before_update()
        self._applying = True
        self.optimizer.set_lr(lr)
        self.optimizer.step()
        self.loss_scale.record_good_step()
        self._applying = False

    def _meet(self) -> None:
        """Averages the replicas' weights with the outer optimizer, unless that is already done at this step."""
        if self.outer is not None and self._met_step != self.steps_done:
            self._before_update()
            self.outer.meet()
            self._met_step = self.steps_done
            self.timer.lap("meet")
