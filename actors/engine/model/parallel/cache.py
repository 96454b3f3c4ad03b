"""The KV cache of a model that several processes compute together. Every member process holds the part of each block
that belongs to its layers and heads. When blocks leave the engine, they are assembled from the parts of all members.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import torch

from raytide.actors.engine.kv_cache.handle import Bytes
from raytide.actors.engine.kv_cache.kv_cache import KvCache
from raytide.actors.engine.model.parallel.collectives import Collectives
from raytide.actors.engine.model.parallel.shard import ModelShard
from raytide.actors.engine.sequence import StepPlan
from raytide.actors.models.architecture import Architecture

if TYPE_CHECKING:
    from raytide.actors.engine.model.parallel.leader import GroupLeader

Tensor = torch.Tensor


class MemberCache(KvCache):
    """The part of the KV cache that one member process holds."""

    def __init__(self, group: Collectives, num_blocks: int, num_host_blocks: int) -> None:
        super().__init__(num_blocks, num_host_blocks)
        self._group = group

    def send_blocks(self, blocks: Items[int], sizes: list[int]) -> list[Tensor]:
        """Sends this member's part of the blocks to the leader. On the leader, returns the parts of all members.
        `sizes` are the sizes of these parts in bytes, by rank.
        """
        own = np.concatenate(KvCache.read(self, blocks))
        return self._group.gather_bytes(torch.from_numpy(own), sizes)

    def receive_blocks(self, blocks: Items[int], parts: list[Tensor]) -> None:
        """Receives this member's part of the blocks from the leader, and writes it. On the leader, `parts` has the
        parts of all members.
        """
        sizes = [kv.nbytes // self.num_blocks * len(blocks) for kv in self.layers]
        own = self._group.scatter_bytes(parts, sum(sizes)).numpy()
        KvCache.write(self, blocks, np.split(own, np.cumsum(sizes)[:-1]))


class LeaderCache(MemberCache):
    """The leader's part of the KV cache. Each method call makes the other members do the same with their parts."""

    def __init__(
        self, leader: GroupLeader, group: Collectives, arch: Architecture, num_blocks: int, num_host_blocks: int
    ) -> None:
        super().__init__(group, num_blocks, num_host_blocks)
        self._leader, self._num_heads, self._num_layers = leader, arch.num_kv_heads, arch.num_layers
        shards = ModelShard.of_group(group.shard.stages, group.shard.size)
        self._parts = [(shard.layers(arch), shard.kv_heads(arch)) for shard in shards]

    def allocate(self, layers: list[Tensor]) -> None:
        self._leader.order(allocate=True)
        super().allocate(layers)
        own, *_ = self.block_bytes
        self.block_bytes = [own * self._num_heads // self._own_heads] * self._num_layers

    def free(self) -> None:
        self._leader.order(free=True)
        super().free()

    def move(self, plan: StepPlan) -> None:
        if plan.swap_out or plan.swap_in or plan.copies:
            self._leader.order(move=[plan.swap_out, plan.swap_in, plan.copies])
            super().move(plan)

    def zero_blocks(self, blocks: Items[int]) -> None:
        if blocks:
            self._leader.order(zero=list(blocks))
            super().zero_blocks(blocks)

    def read(self, blocks: Items[int]) -> tuple[Bytes, ...]:
        """Returns the content of these blocks, as one array of bytes for each layer. Each array contains the heads of
        all members.
        """
        rows = list(blocks)
        if not rows or not self.layers:
            return super().read(rows)
        self._leader.order(read=rows)
        own_bytes = self.block_bytes[0] * len(rows) * self._own_heads // self._num_heads
        with self._leader.together():
            parts = self.send_blocks(rows, [own_bytes * len(layers) for layers, _ in self._parts])
        positions = own_bytes // (self._own_heads * self._head_bytes)
        whole_LPKE = np.empty((self._num_layers, positions, self._num_heads, self._head_bytes), np.uint8)
        for (layers, (first, end)), part in zip(self._parts, parts, strict=True):
            own_LPKE = part.numpy().reshape(len(layers), positions, end - first, self._head_bytes)
            whole_LPKE[layers.start : layers.stop, :, first:end] = own_LPKE
        return tuple(whole_LPKE.reshape(self._num_layers, -1))

    def write(self, blocks: Items[int], layers: Items[Bytes]) -> None:
        rows = list(blocks)
        if not rows:
            return
        self._leader.order(write=rows)
        whole_PKE = [layer.reshape(-1, self._num_heads, self._head_bytes) for layer in layers]
        parts = [
            torch.from_numpy(np.concatenate([whole_PKE[index][:, first:end].reshape(-1) for index in own]))
            for own, (first, end) in self._parts
        ]
        with self._leader.together():
            self.receive_blocks(rows, parts)

    @property
    def _own_heads(self) -> int:
        _, (first, end) = self._parts[0]
        return end - first

    @property
    def _head_bytes(self) -> int:
        """The bytes of one head at one position."""
        return self.layers[0].shape[-1] * self.layers[0].element_size()
