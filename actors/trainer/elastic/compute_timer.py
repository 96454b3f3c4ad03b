"""Times a rank's own computing, without its waiting for other ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raytide.actors.trainer.model.transformer import Transformer
from raytide.actors.trainer.run_log.step_timer import StepTimer


class ComputeTimer:
    """Times the forward pass through the first block of each part of the model.

    Nothing is sent within a block unless it is split itself (tensor and context parallelism): sharded weights are
    gathered before it, and gradients are reduced after its backward pass. One block stands for the others of its part.
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
        """Returns the seconds of the forward passes since the last call, as far as the device has finished them."""
        return sum(timer.drain_times().get("block", 0.0) * blocks for timer, blocks in self._timers)
