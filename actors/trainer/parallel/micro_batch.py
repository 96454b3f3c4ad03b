"""Halves the microbatch when a training step runs out of memory. The global batch stays the same.

A single process repeats the step, because nothing of the step was applied. In a gang, other ranks are waiting in a
collective, so the error ends the generation of ranks. The next generation uses the smaller microbatch.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raytide.actors.trainer.distributed.local_shards import local
from raytide.actors.trainer.optim.base import Optimizer


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that device or host memory ran out. It also reads the error's message, because
    torch has an exception class only for device memory.
    """
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def offload_state(parts: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies this rank's weights and optimizer state to host memory and returns the copies. Empties the device's memory
    caches.
    """
    live = _live(parts, optimizer.tensors())
    saved = {name: local(tensor).detach().cpu().clone() for name, tensor in live.items()}
    del live
    gc.collect()  # the failed step's graph
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return saved


@torch.no_grad()
def restore_state(parts: Sequence[nn.Module], optimizer: Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Loads the result of `offload_state` into a model of the same layout."""
    tensors = optimizer.tensors()
    for name, tensor in _live(parts, tensors).items():
        local(tensor).copy_(saved[name])
    optimizer.load(tensors)


def _live(parts: Sequence[nn.Module], moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {f"model.{name}": weight for part in parts for name, weight in part.named_parameters()}
    return weights | {f"optim.{name}": tensor for name, tensor in moments.items()}
