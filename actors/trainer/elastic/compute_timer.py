"""Measures for how long a rank computes. The time for which the rank waits for other ranks is left out."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.run_log.step_timer import StepTimer


class ComputeTimer:
    """Times the forward pass through the first block of each model part on this rank.

    Normally nothing is sent within a block: sharded weights are gathered before the block, and gradients are reduced
    after its backward pass. Only tensor and context parallelism communicate within a block. The first block stands for
    all blocks of its part.
    """

    def __init__(self, parts: Iterable[Transformer], device: torch.device) -> None:
        self._timers: list[tuple[StepTimer, int]] = []
        for part in parts:
            blocks = list(part.layers.values())
            if blocks:
                timer = StepTimer(device)
                blocks[0].register_forward_pre_hook(lambda *_, timer=timer: timer.start())
                blocks[0].register_forward_hook(lambda *_, timer=timer: timer.lap("block"))
                self._timers.append((timer, len(blocks)))

    def drain_forward_s(self) -> float:
        """Returns the estimated seconds of all forward passes since the last call. Passes that the device has not
        finished are counted by a later call.
        """
        return sum(timer.drain_times().get("block", 0.0) * blocks for timer, blocks in self._timers)
