"""The outer optimizer of replicas that train independently for some steps and then synchronise (local SGD, DiLoCo).
Such a synchronisation is called a meeting. It computes new weights, with which all replicas continue.

A replica's movement is the change of its weights since the last meeting. The replicas' movements are averaged, and so
are the moments of the inner optimizer. After a meeting the replicas are therefore bitwise equal. The price is that
the moments are exchanged as well. The checkpoint of one replica is valid for all replicas, and any layout can continue
from it. Checkpoints are only written at a meeting, and their weights are those of that meeting.
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
    """Nesterov SGD over replicas. Checkpoints contain the state of this optimizer and of the inner optimizer."""

    def __init__(
        self, inner: Optimizer, spec: OuterSpec, replicas: dist.ProcessGroup, compressed: AverageOver | None
    ) -> None:
        """`compressed` averages the movements over the replicas with compression; None averages them without."""
        self.inner, self.spec, self.replicas = inner, spec, replicas
        self._average = compressed or self._mean
        self._starts = {parameter: local(parameter).detach().clone() for parameter in inner.state}
        self._momenta = {parameter: torch.zeros_like(start) for parameter, start in self._starts.items()}

    @torch.no_grad()
    def meet(self) -> None:
        """Sets the weights of all replicas to the same new values. All ranks must call it after the same step."""
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
        """Returns the state for a checkpoint, in the form of `Optimizer.tensors`."""
        own = {self._name(parameter): like(momentum, parameter) for parameter, momentum in self._momenta.items()}
        return self.inner.tensors() | own

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the state from the tensors of `tensors()`. Call it after a checkpoint was read into these tensors and
        after the weights were loaded.
        """
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
