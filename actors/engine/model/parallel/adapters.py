"""One member's part of a LoRA adapter: cut as the modules are, with a sum of its own where inputs are cut."""

from __future__ import annotations

import torch

from raytide.actors.engine.model.parallel.collectives import Collectives
from raytide.actors.engine.model.parallel.shard import linear_cuts
from raytide.actors.models.architecture import Architecture
from raytide.actors.models.naming import NAMES

Tensor = torch.Tensor


class AdapterShard:
    """Cuts A and B of one member's layers. `arch` is what the member computes, `layers` are those of its stage."""

    def __init__(self, arch: Architecture, group: Collectives) -> None:
        shard, names = group.shard, NAMES[arch.names]
        self.arch, self.layers, self._group = shard.architecture(arch), shard.layers(arch), group
        self._cuts = {
            names.layer.format(index) + path: cut
            for index in self.layers
            for path, cut in linear_cuts(arch, index, shard).items()
        }

    def cut(self, module: str, a_RN: Tensor, b_MR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this member's columns of A, or rows of B."""
        cut = self._cuts[module]
        if not cut.by_input:
            return a_RN, torch.cat([b_MR[first:end] for first, end in cut.ranges])
        ((first, end),) = cut.ranges
        return a_RN[:, first:end].contiguous(), b_MR

    def sum(self, partial_TR: Tensor) -> Tensor:
        """Returns A's product with the whole input, from its products with the parts."""
        return self._group.sum(partial_TR)
