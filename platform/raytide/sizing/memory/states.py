"""The bytes of one rank's weights, gradients and optimizer state, exactly as raytide's trainer allocates them.

Tensor parallelism divides a weight along one of its dimensions. The shard and context axes then divide the weight along
its first dimension, as in FSDP2. The bytes are those of rank 0, which has the largest part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from raytide.core.specs.model import LoraSpec
from raytide.core.specs.optim import OptimName
from raytide.core.specs.parallelism import Parallelism
from raytide.sizing.model_shape import ModelShape, WeightTensor
from raytide.sizing.workload import STATE_BYTES, Strategy, TrainWorkload

_STEP = 4
"""The bytes of the optimizer's step counter of one parameter."""
_BLOCK, _MIN_QUANTIZED = 256, 4096
"""For adamw8bit, the number of values that share a scale, and the size of the smallest tensor that is quantized
(Dettmers et al. 2021).
"""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FFN = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class StateBytes:
    """The sizes in bytes of the states that one rank keeps allocated for the whole run. Also includes the numbers of
    elements in the rank's gathered weights.
    """

    weights: int
    gradients: int
    optimizer: int
    computed: int
    """The elements of the rank's part of the model, gathered over the shard axis."""
    computed_trained: int
    """The elements of `computed` that are trained."""
    largest_layer: int
    """The elements of the rank's largest layer, gathered."""
    outside: int
    """The elements outside of layers: embedding, last norm and head."""


def rank_states(workload: TrainWorkload, strategy: Strategy, pipeline_rank: int = 0) -> StateBytes:
    """Returns the states of one rank. `pipeline_rank` is the rank's index on the pipeline axis. On all other axes, the
    rank's index is 0.
    """
    model, sizes, layout = workload.model, strategy.sizes, strategy.layout
    ranks, found, largest, outside = sizes.shard * sizes.context, _NOTHING, 0, 0
    for stage in layout.stages_of(pipeline_rank):
        layers = layout.stage_layers(stage, model.layers)
        sparse = sum(index in model.sparse_layers for index in layers)
        ends = _unit_bytes(workload, (stage == 0, stage == layout.total_stages - 1), sizes.tensor, ranks)
        outside += ends.computed
        found = found.plus(ends, 1)
        for kind, count in (("sparse", sparse), ("dense", len(layers) - sparse)):
            if count:
                unit = _unit_bytes(workload, kind, sizes.tensor, ranks)
                largest = max(largest, unit.computed)
                found = found.plus(unit, count)
    return StateBytes(
        found.weights, found.gradients, found.optimizer, found.computed, found.computed_trained, largest, outside
    )


@dataclass(frozen=True, slots=True)
class _Unit:
    """The sums over the weights of one layer, or over all weights outside of layers."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    computed: int = 0
    computed_trained: int = 0

    def plus(self, other: _Unit, times: int) -> _Unit:
        return _Unit(
            self.weights + times * other.weights,
            self.gradients + times * other.gradients,
            self.optimizer + times * other.optimizer,
            self.computed + times * other.computed,
            self.computed_trained + times * other.computed_trained,
        )


_NOTHING = _Unit()


@lru_cache(maxsize=4096)
def _unit_bytes(workload: TrainWorkload, kind: str | tuple[bool, bool], tensor: int, ranks: int) -> _Unit:
    """Returns the sums over a `dense` or `sparse` layer, or over the weights before the first and after the last
    layer."""
    model = workload.model
    if isinstance(kind, tuple):
        plain = model.weights(range(0), first=kind[0], last=kind[1])
    else:
        plain = model.layer_weights(sparse=kind == "sparse")
    everything = list(with_adapters(plain, workload.lora, model))
    trained = [weight for weight in everything if weight.is_trained]
    return _Unit(
        weights=STATE_BYTES * _total(everything, model, tensor, ranks),
        gradients=STATE_BYTES * _total(trained, model, tensor, ranks),
        optimizer=sum(optimizer_bytes(workload.optimizer.name, each, model, tensor, ranks) for each in trained),
        computed=_total(everything, model, tensor, 1),
        computed_trained=_total(trained, model, tensor, 1),
    )


def local_shape(weight: WeightTensor, model: ModelShape, tensor: int, ranks: int) -> tuple[int, ...]:
    """Returns the shape of rank 0's part of a weight. The weight is divided among `tensor` tensor ranks, and then each
    part among `ranks` ranks.
    """
    shape = list(weight.shape)
    if weight.division is not None and _is_divided(weight, model, tensor):
        shape[weight.division] = -(-shape[weight.division] // tensor)
    shape[0] = -(-shape[0] // ranks)
    return tuple(shape)


def optimizer_bytes(name: OptimName, weight: WeightTensor, model: ModelShape, tensor: int, ranks: int) -> int:
    """Returns the bytes of the optimizer state for the first rank's part of a weight."""
    local = local_shape(weight, model, tensor, ranks)
    elements = math.prod(local)
    if name == "muon" and weight.is_hidden and len(local) >= 2:
        return STATE_BYTES * elements
    if name == "adafactor":
        if len(local) < 2:
            return STATE_BYTES * elements + _STEP
        return STATE_BYTES * (elements // local[-1] + elements // local[-2]) + _STEP
    if name == "adamw8bit" and len(local) >= 2 and weight.numel >= _MIN_QUANTIZED:
        scales = elements // local[-1] * -(-local[-1] // min(_BLOCK, local[-1]))
        return 2 * (elements + STATE_BYTES * scales) + _STEP
    return 2 * STATE_BYTES * elements + _STEP


def with_adapters(weights: Iterator[WeightTensor], lora: LoraSpec | None, model: ModelShape) -> Iterator[WeightTensor]:
    """Yields the weights, and with LoRA also the adapters.

    With LoRA the weights are frozen. Each adapted weight is followed by its two adapters (Hu et al. 2021).
    """
    if lora is None:
        yield from weights
        return
    possible = _ATTENTION if model.experts else (*_ATTENTION, *_FFN)
    targets = possible if lora.targets is None else lora.targets
    for weight in weights:
        yield replace(weight, is_trained=False)
        if weight.module in targets and weight.module in possible and len(weight.shape) == 2:
            rows, columns = weight.shape
            inner, outer = (1 if weight.division == 1 else None), (0 if weight.division == 0 else None)
            yield WeightTensor(weight.module, (lora.rank, columns), inner, is_hidden=True)
            yield WeightTensor(weight.module, (rows, lora.rank), outer, is_hidden=True)


def busiest_pipeline_ranks(layout: Parallelism) -> Sequence[int]:
    """Returns the first, the middle and the last pipeline rank, without repeats. One of them needs the most memory."""
    return sorted({0, layout.pipeline // 2, layout.pipeline - 1})


def _total(weights: Sequence[WeightTensor], model: ModelShape, tensor: int, ranks: int) -> int:
    return sum(math.prod(local_shape(weight, model, tensor, ranks)) for weight in weights)


def _is_divided(weight: WeightTensor, model: ModelShape, tensor: int) -> bool:
    if weight.module in ("embedding", "head"):
        return model.vocab % tensor == 0
    if weight.module in ("k_proj", "v_proj"):
        return model.kv_heads % tensor == 0
    return True
