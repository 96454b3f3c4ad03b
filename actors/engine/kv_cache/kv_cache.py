"""The memory of the KV cache: device blocks, host blocks, and the moves between them."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch

from raytide.actors.engine.kv_cache.handle import Bytes
from raytide.actors.engine.sequence import StepPlan

Tensor = torch.Tensor


class KvCache:
    """The KV memory of device and host, and the moves of blocks between them.

    `layers` holds one tensor [2, S, K, D] on the device for each layer. The model reads and writes these tensors. S
    is the number of slots in `num_blocks` blocks.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.layers: list[Tensor] = []
        self.block_bytes: list[int] = []  # of one block in each layer
        self._host: list[Tensor] = []  # per layer [2, num_host_blocks, a block's elements]

    def allocate(self, layers: list[Tensor]) -> None:
        """Takes over the zeroed tensors `layers` on the device, and allocates matching host memory. For CUDA, the host
        memory is pinned, so that the device can copy it directly.
        """
        if self.num_host_blocks:
            self._host = [
                torch.zeros(
                    2,
                    self.num_host_blocks,
                    kv.numel() // (2 * self.num_blocks),
                    dtype=kv.dtype,
                    pin_memory=kv.is_cuda,
                )
                for kv in layers
            ]
        self.layers = layers
        self.block_bytes = [kv.nbytes // self.num_blocks for kv in layers]

    def free(self) -> None:
        self.layers, self._host = [], []

    def move(self, plan: StepPlan) -> None:
        """Moves blocks as the plan says. Call it once, before the plan's chunks are computed."""
        for kv, host in zip(self.layers, self._host, strict=False):
            blocks = self._blocks(kv)
            if plan.swap_out:
                sources, targets = zip(*plan.swap_out, strict=True)
                host[:, targets] = blocks[:, sources].to(host.device)
            if plan.swap_in:
                sources, targets = zip(*plan.swap_in, strict=True)
                blocks[:, targets] = host[:, sources].to(blocks.device)
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            for kv in self.layers:
                blocks = self._blocks(kv)
                blocks[:, targets] = blocks[:, sources]

    def zero_blocks(self, blocks: Items[int]) -> None:
        """Zeroes blocks that may hold NaN. Attention multiplies the values of padding by 0, and 0 times NaN is NaN."""
        for kv in self.layers:
            self._blocks(kv)[:, list(blocks)] = 0.0

    def read(self, blocks: Items[int]) -> tuple[Bytes, ...]:
        """Returns for each layer the content of these blocks, as bytes in host memory."""
        rows = list(blocks)
        if not rows:  # a sleeping cache has no layers
            return tuple(np.empty(0, np.uint8) for _ in self.block_bytes)
        return tuple(
            self._blocks(kv)[:, rows].transpose(0, 1).contiguous().cpu().view(torch.uint8).numpy().reshape(-1)
            for kv in self.layers
        )

    def write(self, blocks: Items[int], layers: Items[Bytes]) -> None:
        """Writes content into these blocks. `layers` is the result of an earlier `read`."""
        rows = list(blocks)
        for kv, data in zip(self.layers, layers, strict=True):
            values = torch.from_numpy(np.array(data)).view(kv.dtype).view(len(rows), 2, -1)
            self._blocks(kv)[:, rows] = values.transpose(0, 1).to(kv.device)

    def _blocks(self, kv: Tensor) -> Tensor:
        return kv.view(2, self.num_blocks, -1)
