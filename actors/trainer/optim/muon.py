"""Muon (Jordan et al. 2024) for hidden matrices, and AdamW for all other parameters.

A matrix's momentum is orthogonalized as a whole. The ranks that share the matrix gather the momentum, and one of these
ranks orthogonalizes and broadcasts it. N ranks work on N different matrices at a time. Updates are scaled as in
Moonlight, so that AdamW's learning rate and weight decay can be used (Liu et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytide.actors.trainer.distributed.local_shards import local, part, whole
from raytide.actors.trainer.optim.adamw import AdamW
from raytide.actors.trainer.optim.base import grad_of, zeros
from raytide.actors.trainer.optim.state_offload import State, StateStorage
from raytide.core.specs.train import OptimSpec

MOMENTUM = "momentum"
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPS = 1e-7


class Muon(AdamW):
    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], spec: OptimSpec, home: StateStorage) -> None:
        self._hidden = {parameter: None for name, parameter in parameters if is_hidden(name, parameter)}
        super().__init__(parameters, spec, home)
        for group in self.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in self._hidden]
        hidden = {"params": list(self._hidden), "lr": spec.lr, "weight_decay": spec.weight_decay}
        self.param_groups.append(hidden)

    def first_state(self, parameter: nn.Parameter) -> State:
        return {MOMENTUM: zeros(parameter)} if parameter in self._hidden else super().first_state(parameter)

    def step_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if group is not self.param_groups[-1]:
            super().step_group(parameters, group)
            return
        for together in by_mesh(parameters):
            ranks = together[0].device_mesh.size() if isinstance(together[0], DTensor) else 1
            for first in range(0, len(together), ranks):
                self._round(together[first : first + ranks], group)

    def _round(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Updates up to one matrix per rank: gathers all, orthogonalizes this rank's, exchanges and applies the
        results.
        """
        me, own_result = _place(parameters[0]), None
        for index, parameter in enumerate(parameters):
            full = whole(self._momentum(parameter), parameter)
            if index == me:
                own_result = orthogonal(full)
        for index, parameter in enumerate(parameters):
            result = own_result if index == me else None
            weight = local(parameter)
            if result is None:
                result = torch.empty(parameter.shape, dtype=torch.bfloat16, device=weight.device)
            _broadcast(result, index, parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            weight.add_(part(result, parameter), alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter) -> Tensor:
        """Updates this rank's shard of the momentum, and returns the Nesterov momentum."""
        grad, stored = grad_of(parameter), self.state[parameter]
        state = self.storage.load(stored, grad.device)
        momentum = state[MOMENTUM].lerp_(grad, 1 - self.spec.momentum)
        self.storage.write_back(stored, state)
        return grad.lerp(momentum, self.spec.momentum)


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Returns whether the parameter is a matrix in a layer, or a stack of matrices (experts). Embeddings and the head
    are not hidden matrices.
    """
    return parameter.ndim >= 2 and ".layers." in f".{name}"


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns an approximation of the closest semi-orthogonal matrix, in bf16. The approximation takes five quintic
    Newton-Schulz iterations.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    out: Tensor = (x.mT if tall else x).contiguous()
    return out


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Returns the parameters, grouped by device mesh. All parameters of a group are shared by the same ranks."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def _place(parameter: Tensor) -> int:
    """Returns this rank's index among the ranks that share the parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    coordinate, place = parameter.device_mesh.get_coordinate(), 0
    assert coordinate is not None
    for axis, index in enumerate(coordinate):
        place = place * parameter.device_mesh.size(axis) + index
    return place


def _broadcast(result: Tensor, place: int, parameter: Tensor) -> None:
    """Broadcasts the `result` of the rank at index `place` to all that share the parameter, one mesh axis at a time."""
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        place, index = divmod(place, mesh.size(axis))
        if mesh.size(axis) > 1:
            dist.broadcast(result, group=mesh.get_group(axis), group_src=index)
