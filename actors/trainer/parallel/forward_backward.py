"""Runs the forward and backward passes of a step's microbatches, in one stage or in a pipeline."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from raytide.actors.models.families import architecture_of
from raytide.actors.models.model_config import read_json
from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.hf.init_weights import load_or_initialise
from raytide.actors.trainer.hf.model_source import ModelSource, model_folder
from raytide.actors.trainer.model import precision
from raytide.actors.trainer.model.distillation import Teacher, TopPredictions, check_teacher, distillation_sum
from raytide.actors.trainer.model.loss import Micro
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.parallel import context_parallel
from raytide.actors.trainer.parallel.pipeline_parallel import Pipeline, free_weights, without_balance
from raytide.actors.trainer.parallel.tensor_parallel import reports_loss
from raytide.core.specs.parallelism import Parallelism
from raytide.core.specs.train import TrainSpec


class ForwardBackward(Protocol):
    def accumulate(self, micros: list[Micro], factor: float) -> float:
        """Accumulates the gradients of `factor` times the summed loss. Returns this rank's share of the summed loss,
        without the factor.
        """

    def evaluate(self, micros: list[Micro]) -> float:
        """Returns this rank's share of the summed loss, without the load-balancing loss of routers. Computes no
        gradients.
        """


def build(spec: TrainSpec, parts: list[Transformer], group: ProcessGroup) -> ForwardBackward:
    if group.sizes.pipeline > 1:
        return Pipeline(spec, parts, group)
    return SingleStage(spec.layout, parts[0], group, None if spec.distill is None else _teacher(spec, parts[0], group))


def _teacher(spec: TrainSpec, student: Transformer, group: ProcessGroup) -> Teacher:
    assert spec.distill is not None
    folder = model_folder(spec.distill.teacher)
    distill = spec.distill.model_copy(update={"teacher": str(folder)})
    check_teacher(distill, student.arch.vocab_size, spec.seq_len)
    config = read_json(folder / "config.json")
    arch = architecture_of(config, str(folder))
    model = Transformer(arch, spec.seq_len)
    load_or_initialise(model, ModelSource(config, arch, folder, ""), seed=0)
    dtype = precision.policy(spec.precision).param_dtype or torch.float32
    return Teacher(distill, model, dtype, group.device)


class SingleStage:
    """The forward and backward passes without a pipeline, where each rank has all layers."""

    def __init__(
        self, layout: Parallelism, part: Transformer, group: ProcessGroup, teacher: Teacher | None = None
    ) -> None:
        self.layout, self.part, self.group, self.teacher = layout, part, group, teacher

    def accumulate(self, micros: list[Micro], factor: float) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        sharded = cast(FSDPModule, self.part)
        for index, micro in enumerate(micros):
            last = index == len(micros) - 1
            sharded.set_is_last_backward(last)
            sharded.set_requires_gradient_sync(last or self.layout.zero >= 2)
            sharded.set_requires_all_reduce(last)  # across replicas, once per step
            sharded.set_reshard_after_backward(last or self.layout.zero == 3)
            loss = self._forward(micro) if self.teacher is None else self._distill(micro, self.teacher)
            (loss * (factor * self.group.gradient_divisor)).backward()
            total += loss.detach()
        return float(total) if reports_loss(self.part, self.group) else 0.0

    @torch.no_grad()
    def evaluate(self, micros: list[Micro]) -> float:
        with without_balance([self.part]):
            total = sum((self._forward(micro).double() for micro in micros), torch.zeros((), dtype=torch.float64))
        free_weights([self.part])
        return float(total) if reports_loss(self.part, self.group) else 0.0

    def _distill(self, micro: Micro, teacher: Teacher) -> Tensor:
        """Returns the summed divergence from the teacher, which runs first: its memory is then free for the student."""
        predicted = teacher.predict(micro)
        logits_BTV: Tensor = self.part(micro.inputs, None, micro.documents)
        flat = (
            predicted.flatten(0, 1)
            if isinstance(predicted, Tensor)
            else TopPredictions(predicted.ids.flatten(0, 1), predicted.log_p.flatten(0, 1))
        )
        loss = distillation_sum(logits_BTV.flatten(0, 1), flat, micro.targets.flatten(), teacher.spec)
        return self.part.with_balance(loss, micro.targets)

    def _forward(self, micro: Micro) -> Tensor:
        loss: Tensor = self.part(
            context_parallel.shard_sequence(micro.inputs, self.group),
            context_parallel.shard_sequence(micro.targets, self.group),
            micro.documents,
        )
        return loss
