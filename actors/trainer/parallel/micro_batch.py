"""How many sequences a rank computes at once, and what happens when that was too many.

Alone, the loop halves and does the step again: nothing of it was applied. In a gang the others wait in a collective by
then, so the error goes up, the generation ends, and the next one forms with half. The global batch stays as it is.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raytide.actors.trainer.distributed.local_shards import local
from raytide.actors.trainer.optim.base import Optimizer

__all__ = ["is_out_of_memory", "offload_state", "restore_state"]


def is_out_of_memory(error: BaseException) -> bool:
    """Of a device, or of the host: torch has a class for the first alone."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def offload_state(parts: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Tensor]:
    """This rank's weights and optimiser state, in host memory, once the device's caches are given back."""
    live = _live(parts, optimizer.tensors())
    saved = {name: local(tensor).detach().cpu().clone() for name, tensor in live.items()}
    del live
    gc.collect()  # the broken step's graph
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return saved


@torch.no_grad()
def restore_state(parts: Sequence[nn.Module], optimizer: Optimizer, saved: Mapping[str, Tensor]) -> None:
    """What `take_out` gave, into a model of the same layout."""
    tensors = optimizer.tensors()
    for name, tensor in _live(parts, tensors).items():
        local(tensor).copy_(saved[name])
    optimizer.load(tensors)


def _live(parts: Sequence[nn.Module], moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {f"model.{name}": weight for part in parts for name, weight in part.named_parameters()}
    return weights | {f"optim.{name}": tensor for name, tensor in moments.items()}
