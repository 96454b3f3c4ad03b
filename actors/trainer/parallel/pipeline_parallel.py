"""Pipeline parallelism with torch's schedules. Each rank has one or more pipeline stages, and a stage has some of the
layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model import precision
from raytide.actors.trainer.model.loss import Micro
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.parallel import context_parallel
from raytide.actors.trainer.parallel.tensor_parallel import reports_loss
from raytide.core.specs.parallelism import Parallelism, Schedule
from raytide.core.specs.train import TrainSpec

_SINGLE: dict[Schedule, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: dict[Schedule, type[PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}


class Pipeline:
    def __init__(self, spec: TrainSpec, parts: list[Transformer], group: ProcessGroup) -> None:
        self.spec, self.parts, self.group = spec, parts, group
        self.layout: Parallelism = spec.layout
        self.tie = TiedEmbeddingSync(parts, group, self.layout)
        self._schedules: dict[tuple[int, int], Any] = {}
        self._factor = 1.0
        self._total = torch.zeros(())

    def accumulate(self, micros: list[Micro], factor: float) -> float:
        """Does the same as `ForwardBackward.accumulate`. All microbatches must have the same shape."""
        self._factor = factor * self.group.gradient_divisor
        loss = self._run(micros, is_training=True)
        self.tie.add_up()
        return loss

    @torch.no_grad()
    def evaluate(self, micros: list[Micro]) -> float:
        with without_balance(self.parts):
            loss = self._run(micros, is_training=False)
        free_weights(self.parts)
        return loss

    def _run(self, micros: list[Micro], *, is_training: bool) -> float:
        inputs_BT, targets_BT = (
            context_parallel.shard_sequence(torch.cat(each), self.group)
            for each in ([micro.inputs for micro in micros], [micro.targets for micro in micros])
        )
        documents = [micro.documents for micro in micros if micro.documents is not None]
        self._total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        schedule = self._schedule(len(micros), len(micros[0].inputs))
        begins, ends = any(part.is_first for part in self.parts), any(part.is_last for part in self.parts)
        (schedule.step if is_training else schedule.eval)(
            *((inputs_BT,) if begins else ()),
            target=targets_BT if ends else None,
            return_outputs=False,
            **({"targets_BT": targets_BT} if ends else {}),
            **({"documents_BT": torch.cat(documents)} if documents else {}),
        )
        return float(self._total) if ends and reports_loss(self.parts[-1], self.group) else 0.0

    def _schedule(self, count: int, size: int) -> Any:
        """Returns the schedule for `count` microbatches of `size`. It is cached: stages hold buffers of that shape."""
        if (count, size) not in self._schedules:
            indices = self.layout.stages_of(self.group.pipeline_rank)
            stages = [self._stage(part, index, size) for part, index in zip(self.parts, indices, strict=True)]
            kind = self.layout.schedule
            # the loss is already divided by the step's tokens; torch would also divide by microbatches
            self._schedules[count, size] = (
                _SINGLE[kind](stages[0], count, self._loss, scale_grads=False)
                if kind in _SINGLE
                else _MULTI[kind](stages, count, self._loss, scale_grads=False)  # type: ignore[arg-type]
            )
        return self._schedules[count, size]

    def _stage(self, part: Transformer, index: int, size: int) -> PipelineStage:
        """Creates a stage with explicit shapes and dtypes, which saves torch a trial run. They must be right, because
        torch does not check them: a wrong dtype would silently train on garbage.
        """
        length = self.spec.seq_len // self.group.sizes.context
        dtype = precision.policy(self.spec.precision).param_dtype or torch.float32
        hidden = torch.empty(
            size,
            length // self.group.sizes.tensor,
            part.arch.hidden_size,
            dtype=dtype,
            device="meta",
            requires_grad=True,
        )
        return PipelineStage(
            part,
            index,
            self.layout.total_stages,
            self.group.device,
            input_args=torch.empty(size, length, dtype=torch.int64, device="meta") if part.is_first else hidden,
            output_args=torch.empty((), device="meta", requires_grad=True) if part.is_last else hidden,
            group=self.group.mesh["pipeline"].get_group(),
        )

    def _loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """Returns the last stage's output times the factor of `accumulate`. The stage's output is the loss already,
        because only that stage has the whole head weight.
        """
        self._total += loss.detach()
        return loss * self._factor


class TiedEmbeddingSync:
    """Keeps the two copies of a tied embedding equal. Each copy gets the sum of both gradients."""

    def __init__(self, parts: list[Transformer], group: ProcessGroup, layout: Parallelism) -> None:
        tied = parts[0].arch.tied_embeddings
        ends = [(part, part.embedding) for part in parts if tied and part.embedding is not None]
        self.mine = [part for part, copy in ends if copy.weight.requires_grad]  # frozen when training adapters
        self.device = group.device
        peers = dist.get_process_group_ranks(group.mesh["pipeline"].get_group())
        self.group = group.mesh["pipeline"].get_group()
        other = layout.pipeline - 1 if self.mine and self.mine[0].is_first else 0
        self.peer = peers[other] if len(self.mine) == 1 else None

    def add_up(self) -> None:
        grads = [self._gradient(part) for part in self.mine]
        if len(grads) == 2:
            grads[0] += grads[1]
            grads[1].copy_(grads[0])
        elif grads:
            assert self.peer is not None
            peer_gradient = torch.empty_like(grads[0])
            exchange = [
                dist.P2POp(dist.isend, grads[0], self.peer, self.group),
                dist.P2POp(dist.irecv, peer_gradient, self.peer, self.group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            grads[0] += peer_gradient

    def _gradient(self, part: Transformer) -> Tensor:
        assert part.embedding is not None
        gradient = part.embedding.weight.grad
        assert isinstance(gradient, DTensor)
        return gradient.to_local()


@contextmanager
def without_balance(parts: list[Transformer]) -> Iterator[None]:
    """Switches off the routers' load-balancing loss in the `with` block. Evaluations use this block, because the
    load-balancing loss says nothing about held-out tokens.
    """
    balances = [part.balance for part in parts]
    for part in parts:
        part.balance = 0.0
    try:
        yield
    finally:
        for part, balance in zip(parts, balances, strict=True):
            part.balance = balance


def free_weights(parts: list[Transformer]) -> None:
    """Frees weights that FSDP has gathered in a forward pass without a backward pass. Otherwise a later step would use
    these old weights after an update.
    """
    for part in parts:
        for module in (part, *part.layers.values()):
            cast(FSDPModule, module).reshard()
