"""A member process's part of the decoder. Each pipeline stage computes some of the layers. The members of a stage
divide the heads and columns of its layers among themselves, and sum their results.

A stage sends two tensors to the next stage: the residual stream, and the tensor that must still be added to it. The
addition is left to the next stage so that a pipeline computes the same bits as one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from raytide.actors.engine.model.decoder import PagedDecoder
from raytide.actors.engine.model.input_batch import StepInputs
from raytide.actors.engine.model.parallel.collectives import Collectives
from raytide.actors.engine.model.parallel.sharded_weights import ShardedWeights
from raytide.actors.engine.model.weight_loader import QuantizedOptions
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.quantized.model_weights import ModelWeights, open_weights
from raytide.kernels.core import LayerWeights
from raytide.kernels.registry import Ops

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Computation:
    """Describes a computation that is divided among several member processes. All members have the same values, except
    for `ops` and `device`. `arch` is the architecture of the whole model.
    """

    arch: Architecture
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    max_len: int
    deterministic: bool
    quantized: QuantizedOptions


class ShardedDecoder(PagedDecoder):
    """One member's part of the forward pass. All members must make the same calls. Only the leader gets all logits."""

    def __init__(self, computation: Computation, model_dir: Path, group: Collectives) -> None:
        arch, options, shard = computation.arch, computation.quantized, group.shard
        whole = open_weights(model_dir, computation.dtype, computation.device)
        weights: ModelWeights = whole if shard.size == 1 else ShardedWeights(whole, arch, shard, options.input)
        layers = None if shard.stages == 1 else shard.layers(arch)
        ops, max_len = computation.ops, computation.max_len
        super().__init__(shard.architecture(arch), weights, ops, max_len, options, layers=layers)
        self._whole_arch, self._group = arch, group
        if shard.size == 1:
            return
        self._layers = [self._with_sums(layer) for layer in self._layers]
        self._in_one_call = None  # sums over the members come between the operators
        self._first_row, self._end_row = shard.part(arch.vocab_size)
        self._lookup = self._look_up

    @torch.inference_mode()
    def head(self, hidden_RN: Tensor) -> Tensor:
        if self.arch.num_labels:  # every member has the few rows of a head that classifies
            return super().head(hidden_RN)
        return self._group.gather_vocabulary(super().head(hidden_RN), self._whole_arch)

    def _enter(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        if self._group.shard.stage == 0:
            return super()._enter(step)
        return self._group.receive_from_before(len(step.ids_T), self._embedding)

    def _leave(self, x_TN: Tensor, delta_TN: Tensor, rows_R: Tensor) -> Tensor:
        group, shard = self._group, self._group.shard
        if shard.stage < shard.stages - 1:
            group.send_on(x_TN, delta_TN)
            return x_TN[:0] if shard.stage else group.receive_back(len(rows_R), x_TN)
        hidden_RN = super()._leave(x_TN, delta_TN, rows_R)
        if shard.stage:
            group.send_back(hidden_RN)
        return hidden_RN

    def _look_up(self, ids_T: Tensor) -> Tensor:
        """Returns the embeddings of tokens. Each member has some rows of the embedding, so it sums over the members."""
        is_elsewhere = (ids_T < self._first_row) | (ids_T >= self._end_row)
        own_TN = self._embedding[(ids_T - self._first_row).masked_fill(is_elsewhere, 0)]
        return self._group.sum(own_TN.masked_fill(is_elsewhere[:, None], 0.0))

    def _with_sums(self, layer: LayerWeights) -> LayerWeights:
        sparse = layer.sparse
        return replace(
            layer,
            attention_out=self._summed(layer.attention_out),
            down=None if layer.down is None else self._summed(layer.down),
            sparse=None if sparse is None else replace(sparse, experts=self._summed(sparse.experts)),
        )

    def _summed(self, partial: Callable[..., Tensor]) -> Callable[..., Tensor]:
        group = self._group
        return lambda *inputs: group.sum(partial(*inputs))
