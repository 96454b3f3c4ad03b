"""AdamW with torch's kernels on this rank's shards. One fused or multi-tensor call updates a whole parameter group."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.adamw import adamw

from raytide.actors.trainer.distributed.local_shards import local
from raytide.actors.trainer.optim.base import STEP, Optimizer, first_step, grad_of, zeros
from raytide.actors.trainer.optim.state_offload import State

FIRST, SECOND = "exp_avg", "exp_avg_sq"


class AdamW(Optimizer):
    def first_state(self, parameter: nn.Parameter) -> State:
        step = first_step(local(parameter).device)  # the fused kernel needs it on the device
        return {STEP: step, FIRST: zeros(parameter), SECOND: zeros(parameter)}

    def step_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if self.storage.is_resident:
            grads, states = [grad_of(p) for p in parameters], [self.state[p] for p in parameters]
            self._together([local(p) for p in parameters], grads, states, group)
        else:
            super().step_group(parameters, group)

    def update(self, parameter: nn.Parameter, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        self._together([local(parameter)], [grad], [state], group)

    def _together(self, params: list[Tensor], grads: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
        adamw(
            params,
            grads,
            [state[FIRST] for state in states],
            [state[SECOND] for state in states],
            [],
            [state[STEP] for state in states],
            fused=self.spec.fused,
            foreach=not self.spec.fused,
            amsgrad=False,
            beta1=self.spec.beta1,
            beta2=self.spec.beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.spec.eps,
            maximize=False,
        )
