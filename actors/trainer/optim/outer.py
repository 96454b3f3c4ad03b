"""The outer optimizer of replicas that train apart (local SGD, DiLoCo): where all go on after each has moved alone.

After a meeting the replicas are equal to the bit, the inner optimizer's moments included: these are averaged too,
at the price of as much traffic as the weights', every few steps. So a checkpoint of one replica is one of all, and any
layout can go on from it. The weights to which a movement is relative are those of the last meeting; they need no
place in a checkpoint, which is only written at one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytide.actors.trainer.distributed.local_shards import like, local
from raytide.actors.trainer.optim.base import Optimizer
from raytide.core.specs.optim import OuterSpec

AverageOver = Callable[[Sequence[tuple[str, Tensor]]], None]
"""Replaces named tensors by their mean over the replicas."""

MOMENTUM = "outer_momentum"


class OuterOptimizer:
    """Nesterov SGD over replicas, and the checkpointed state of the inner optimizer and its own."""

    def __init__(
        self, inner: Optimizer, spec: OuterSpec, replicas: dist.ProcessGroup, compressed: AverageOver | None
    ) -> None:
        """`compressed` averages the movements if they are compressed."""
        self.inner, self.spec, self.replicas = inner, spec, replicas
        self._average = compressed or self._mean
        self._starts = {parameter: local(parameter).detach().clone() for parameter in inner.state}
        self._momenta = {parameter: torch.zeros_like(start) for parameter, start in self._starts.items()}

    @torch.no_grad()
    def meet(self) -> None:
        """Moves the weights of all replicas to one place. All ranks call it after the same step."""
        names = self.inner.names
        moved = {parameter: start - local(parameter) for parameter, start in self._starts.items()}
        self._average([(names[parameter], movement) for parameter, movement in moved.items()])
        for parameter, movement in moved.items():
            momentum, start = self._momenta[parameter], self._starts[parameter]
            momentum.mul_(self.spec.momentum).add_(movement)
            start.sub_(movement.add_(momentum, alpha=self.spec.momentum), alpha=self.spec.lr)
            local(parameter).copy_(start)
        moments = self.inner.tensors()
        self._mean([(name, local(tensor)) for name, tensor in moments.items() if tensor.is_floating_point()])
        self.inner.load(moments)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint; see `Optimizer.tensors`."""
        own = {self._name(parameter): like(momentum, parameter) for parameter, momentum in self._momenta.items()}
        return self.inner.tensors() | own

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the state from the filled tensors of `tensors`. The weights are those of the checkpoint by now."""
        self.inner.load(tensors)
        for parameter, start in self._starts.items():
            momentum, loaded = self._momenta[parameter], local(tensors[self._name(parameter)])
            if momentum.data_ptr() != loaded.data_ptr():
                momentum.copy_(loaded)
            start.copy_(local(parameter))

    def _name(self, parameter: nn.Parameter) -> str:
        return f"{self.inner.names[parameter]}.{MOMENTUM}"

    def _mean(self, named: Sequence[tuple[str, Tensor]]) -> None:
        for _, tensor in named:
            if tensor.numel():
                dist.all_reduce(tensor, group=self.replicas)
                tensor.div_(self.replicas.size())
