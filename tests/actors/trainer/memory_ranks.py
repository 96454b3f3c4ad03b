"""The ranks of the memory tests: what the trainer allocates for states, and keeps between forward and backward."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytide.actors.trainer.distributed import process_group
from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.trainer import Trainer
from raytide.core.specs.train import TrainSpec


@dataclass(frozen=True)
class Measured:
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """The most that the forward pass of one micro-batch left, over all parts and micro-batches."""


class Kept(TorchDispatchMode):
    """The storages that operations made inside and that something still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                ref = StorageWeakRef(leaf.untyped_storage())
                self._made[ref.cdata] = ref
        if func.namespace == "fsdp":  # buffers of gathered weights
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, Tensor):
                    self._made.pop(leaf.untyped_storage()._cdata, None)
        return out

    def nbytes(self, without: set[int]) -> int:
        """Returns the bytes of those that are alive, `without` some storages by their address."""
        alive = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._made.values())
        return sum(each.nbytes() for each in alive if each is not None and each._cdata not in without)


def measure(specs: Sequence[TrainSpec], rank: int, world: int, meet: str) -> list[Measured]:
    return [_measure(spec, rank, world, f"{meet}-{index}") for index, spec in enumerate(specs)]


def _measure(spec: TrainSpec, rank: int, world: int, meet: str) -> Measured:
    sizes = spec.layout.sizes(world)
    mine = process_group.join(dist.FileStore(meet, sizes.world), rank, sizes, timeout_s=30.0)
    kept: list[int] = []
    gradients: list[int] = []
    forward = Transformer.forward

    def watched(part: Transformer, *args: Any, **named: Any) -> Any:
        with Kept() as made:
            out = forward(part, *args, **named)
            gc.collect()
            weights = {each.untyped_storage()._cdata for each in _plain(part)}
            ids = {each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, Tensor)}
            kept.append(made.nbytes(weights - ids))
        return out

    def reduced(trainer: Trainer) -> None:
        parts = trainer.model_parts
        gradients.append(
            sum(_local(each.grad).nbytes for part in parts for each in part.parameters() if each.grad is not None)
        )

    with patch.object(Transformer, "forward", watched), patch.object(Trainer, "_reduce", reduced):
        trainer = Trainer(spec, mine)
        weights = sum(_local(each).nbytes for part in trainer.model_parts for each in part.parameters())
        optimizer = sum(value.nbytes for state in trainer.optimizer.state.values() for value in state.values())
        trainer.step()
    trainer.close()
    del trainer
    gc.collect()
    process_group.leave()
    return Measured(weights, max(gradients), optimizer, max(kept))


def _plain(part: Transformer) -> Iterator[Tensor]:
    """Yields the weights as the forward pass sees them, gathered or not."""
    for weight in part.parameters():
        yield _local(weight)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
