"""Runs forward and backward of a step's microbatches, in one stage or in a pipeline."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model.loss import Micro
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.parallel import context_parallel
from raytide.actors.trainer.parallel.pipeline_parallel import Pipeline, free_weights, without_balance
from raytide.actors.trainer.parallel.tensor_parallel import reports_loss
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec


class ForwardBackward(Protocol):
    def accumulate(self, micros: list[Micro], factor: float) -> float:
        """Accumulate gradients of `factor` times the summed loss. Returns this rank's share of that sum, unscaled."""

    def evaluate(self, micros: list[Micro]) -> float:
        """Returns this rank's share of the summed loss. Computes no gradients, and no loss of a router."""


def build(spec: TrainSpec, parts: list[Transformer], group: ProcessGroup) -> ForwardBackward:
    if group.sizes.pipeline > 1:
        return Pipeline(spec, parts, group)
    return SingleStage(spec.layout, parts[0], group)


class SingleStage:
    """Forward and backward passes without a pipeline: all layers are on this rank."""

    def __init__(self, layout: Parallelism, part: Transformer, group: ProcessGroup) -> None:
        self.layout, self.part, self.group = layout, part, group

    def accumulate(self, micros: list[Micro], factor: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        sharded = cast(FSDPModule, self.part)
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            sharded.set_is_last_backward(last)
            sharded.set_requires_gradient_sync(last or self.layout.zero >= 2)
            sharded.set_requires_all_reduce(last)  # across replicas, once per step
            sharded.set_reshard_after_backward(last or self.layout.zero == 3)
            loss = self._forward(micro)
            (loss * (factor * self.group.gradient_divisor)).backward()
            total += loss.detach()
        return float(total) if reports_loss(self.part, self.group) else 0.0

    @torch.no_grad()
    def evaluate(self, micros: list[Micro]) -> float:
        with without_balance([self.part]):
            total = sum((self._forward(micro).double() for micro in micros), torch.zeros((), dtype=torch.float64))
        free_weights([self.part])
        return float(total) if reports_loss(self.part, self.group) else 0.0

    def _forward(self, micro: Micro) -> Tensor:
        loss: Tensor = self.part(
            context_parallel.shard_sequence(micro.inputs, self.group),
            context_parallel.shard_sequence(micro.targets, self.group),
            micro.documents,
        )
        return loss
