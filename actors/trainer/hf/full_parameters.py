"""Gathers full parameters on rank 0, one at a time, in any layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.distributed.process_group import ProcessGroup
from raytide.actors.trainer.model.transformer import Transformer

__all__ = ["FullParameters"]


class FullParameters:
    """All ranks gather the same parameters in the same order; only rank 0 receives them."""

    def __init__(self, parts: Sequence[Transformer], group: ProcessGroup) -> None:
        self._group, self.is_first = group, group.is_first
        self._local = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        held: list[dict[str, torch.Size]] = [{} for _ in range(group.world)]
        dist.all_gather_object(held, {name: each.shape for name, each in self._local.items()}, group=group.io)
        self._owner = {name: rank for rank in reversed(range(group.world)) for name in held[rank]}
        self._shape = {name: shape for shapes in held for name, shape in shapes.items()}

    @torch.no_grad()
    def gather(self, name: str) -> Tensor | None:
        """Returns the parameter in float32 on the CPU, on rank 0. The ranks that hold its shards combine them, and the
        lowest sends it."""
        dist.barrier(group=self._group.io)  # rank 0 may write a file for longer than the collective timeout
        parameter, owner = self._local.get(name), self._owner[name]
        full: Tensor | None = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if self._group.rank == owner:
            assert full is not None
            full = full.detach().float().cpu().contiguous()
            if owner != 0:
                dist.send(full, 0, group=self._group.io)
        if self._group.rank != 0:
            return None
        if owner != 0:
            full = torch.empty(self._shape[name])
            dist.recv(full, owner, group=self._group.io)
        return full
