"""Whole parameters on rank 0, one after the other, from wherever the layout put their shards."""

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
    """All ranks ask for the same parameters in the same order; only rank 0 gets them."""

    def __init__(self, parts: Sequence[Transformer], group: ProcessGroup) -> None:
        self._group, self.is_first = group, group.is_first
        self._mine = {name: parameter for part in parts for name, parameter in part.named_parameters()}
        held: list[dict[str, torch.Size]] = [{} for _ in range(group.world)]
        dist.all_gather_object(held, {name: each.shape for name, each in self._mine.items()}, group=group.io)
        self._owner = {name: rank for rank in reversed(range(group.world)) for name in held[rank]}
        self._shape = {name: shape for shapes in held for name, shape in shapes.items()}

    @torch.no_grad()
    def gather(self, name: str) -> Tensor | None:
        """In float32 on the CPU. Those that hold shards of it put it together, and the lowest of them sends it."""
        dist.barrier(group=self._group.io)  # rank 0 may be writing a file for longer than a collective may take
        mine, owner = self._mine.get(name), self._owner[name]
        full: Tensor | None = mine.full_tensor() if isinstance(mine, DTensor) else mine
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
