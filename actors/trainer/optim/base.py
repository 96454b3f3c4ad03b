"""The base of the optimizers: parameter groups, state that exists before the first step, and the state's form in
checkpoints.

The state is kept as plain tensors of this rank's shards. Checkpoints store it in full precision and in the parameter's
layout. A checkpoint can therefore be loaded into any layout and any storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytide.actors.trainer.distributed.local_shards import like, local
from raytide.actors.trainer.optim.state_offload import State, StateStorage, release
from raytide.core.specs.train import OptimSpec

STEP = "step"


class Optimizer(ABC):
    """The base of sharded optimizers: parameter groups, state and checkpoints.

    As in torch, a parameter group has `params`, `lr` and `weight_decay`. All ranks must call `step` together. No
    other method communicates.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], spec: OptimSpec, home: StateStorage) -> None:
        self.spec, self.storage = spec, home
        self.names = {parameter: name for name, parameter in parameters}
        matrices = [parameter for _, parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for _, parameter in parameters if parameter.ndim < 2]
        self.param_groups: list[dict[str, Any]] = [
            {"params": matrices, "lr": spec.lr, "weight_decay": spec.weight_decay},
            {"params": vectors, "lr": spec.lr, "weight_decay": 0.0},
        ]
        self.state: dict[nn.Parameter, State] = {
            parameter: home.store(self.first_state(parameter)) for _, parameter in parameters
        }

    @abstractmethod
    def first_state(self, parameter: nn.Parameter) -> State:
        """Returns the initial state for this rank's shard of a parameter."""

    @abstractmethod
    def update(self, parameter: nn.Parameter, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        """Updates this rank's shard of one parameter and the shard's state in place. `grad` is the gradient of the
        shard.
        """

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            self.step_group([p for p in group["params"] if p.grad is not None], group)

    def step_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Updates the given parameters of one group. All of them must have a gradient."""
        for parameter in parameters:
            state = self.storage.load(self.state[parameter], local(parameter).device)
            self.update(parameter, grad_of(parameter), state, group)
            self.storage.write_back(self.state[parameter], state)
            release(local(parameter))
            release(grad_of(parameter))

    def zero_grad(self) -> None:
        for parameter in self.state:
            parameter.grad = None

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint, as tensors by `parameter.key`. To load a checkpoint, fill these tensors
        in place and then call `load`. The tensors stay where the state is stored.
        """
        self.storage.wait()
        return {
            f"{self.names[parameter]}.{key}": self.placed(parameter, key, value)
            for parameter, state in self.state.items()
            for key, value in self.to_full_precision(state).items()
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the state from the tensors of `tensors()`, after a checkpoint was read into them."""
        for parameter, state in self.state.items():
            for key in self.checkpoint_keys(state):
                self.from_full_precision(state, key, local(tensors[f"{self.names[parameter]}.{key}"]))

    def placed(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        """Returns this rank's `value` as a DTensor that is placed like the parameter."""
        return value if key == STEP else like(value, parameter)

    def checkpoint_keys(self, state: State) -> list[str]:
        """Returns those keys of the state that checkpoints store."""
        return list(state)

    def to_full_precision(self, state: State) -> State:
        """Returns the state of a parameter in full precision."""
        return state

    def from_full_precision(self, state: State, key: str, value: Tensor) -> None:
        """Sets one key of the state from a value in full precision."""
        if state[key].data_ptr() != value.data_ptr():
            state[key].copy_(value)


def grad_of(parameter: nn.Parameter) -> Tensor:
    """Returns this rank's shard of the parameter's gradient."""
    assert parameter.grad is not None
    return local(parameter.grad)


def first_step(device: torch.device | str = "cpu") -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=device)


def zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(local(parameter), memory_format=torch.contiguous_format)
