"""The strategies worth considering for a workload on a number of devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Literal

from raytide.core.specs.parallelism import Parallelism, Sizes
from raytide.core.specs.train import MemorySpec, Remat
from raytide.sizing.workload import TrainWorkload

_REMATS: tuple[Remat, ...] = ("none", "selective", "full")
_LONG_SEQUENCE = 16_384
"""Below it, context parallelism never pays: a sequence's activations fit."""
_MOST_PIPELINE, _MOST_CONTEXT = 16, 8
_LOSS_CHUNK = 4096
_LARGE_VOCABULARY = 16_384
_MICRO_BATCHES = (32, 16, 8, 4, 2, 1)


def layouts(workload: TrainWorkload, world: int, devices_per_node: int) -> Iterator[tuple[Sizes, Parallelism]]:
    """Yields the meshes of exactly `world` ranks that the trainer accepts for the model.

    The tensor axis stays within a node. A model that is sharded over several nodes may also be copied to each of them.
    """
    contexts = _powers(_MOST_CONTEXT) if workload.seq_len >= _LONG_SEQUENCE else [1]
    for tensor, pipeline, context in product(_powers(devices_per_node), _powers(_MOST_PIPELINE), contexts):
        rest, odd = divmod(world, tensor * pipeline * context)
        if odd or not is_possible(workload, tensor, pipeline, context):
            continue
        for replicate in {1, max(1, rest * tensor * pipeline * context // devices_per_node), rest}:
            if rest % replicate or rest > workload.global_batch:
                continue
            for zero in _zeros(pipeline, rest // replicate * context):
                layout = Parallelism(
                    replicate=replicate,
                    shard=rest // replicate,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    zero=zero,
                )
                if math.ceil(workload.global_batch / rest) >= layout.min_microbatches:
                    yield layout.sizes(world), layout


def is_possible(workload: TrainWorkload, tensor: int, pipeline: int, context: int) -> bool:
    """Returns whether the trainer accepts these sizes of axes (the rules of actors/trainer/parallel/validate.py)."""
    model = workload.model
    pieces = tensor if context == 1 else math.lcm(2 * context, context * tensor)
    if workload.seq_len % pieces or model.layers < pipeline:
        return False
    if tensor == 1:
        return True
    has_dense = len(model.sparse_layers) < model.layers
    divides = model.heads % tensor == 0 and (not has_dense or model.ffn % tensor == 0)
    divides = divides and (not model.experts or model.expert_ffn % tensor == 0)
    shares = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return divides and shares and workload.precision != "fp8"


def memory_options(workload: TrainWorkload, layout: Parallelism, base: MemorySpec) -> Iterator[MemorySpec]:
    """Yields the memory options for a layout: each kind of checkpointing, with whole logits and in chunks."""
    chunks = [base.loss_chunk]
    if not base.loss_chunk and layout.tensor == 1 and workload.model.vocab >= _LARGE_VOCABULARY:
        chunks.append(_LOSS_CHUNK)
    for remat, chunk in product(_REMATS, chunks):
        if remat == "selective" and base.activations != "none":
            continue
        yield base.model_copy(update={"checkpointing": remat, "loss_chunk": chunk})


def micro_batches(workload: TrainWorkload, sizes: Sizes) -> list[int]:
    """Returns the sizes of micro-batches to try, largest first; none exceeds a data rank's share of a step."""
    rows = math.ceil(workload.global_batch / sizes.data)
    return [size for size in _MICRO_BATCHES if size <= rows]


def world_sizes(devices_per_node: int, most_nodes: int) -> list[tuple[int, int]]:
    """Returns (nodes, devices): parts of one node, then one node, two, four and so on, and all."""
    parts = [(1, size) for size in _powers(devices_per_node) if size < devices_per_node]
    counts = sorted({*_powers(most_nodes), most_nodes} - {0})
    return parts + [(nodes, nodes * devices_per_node) for nodes in counts]


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _zeros(pipeline: int, ranks: int) -> tuple[Literal[1, 2, 3], ...]:
    """Returns the ZeRO stages worth trying. A pipeline has no stage 2, and one rank has nothing to shard."""
    if ranks == 1:
        return (3,)
    return (1, 3) if pipeline > 1 else (2, 3)
