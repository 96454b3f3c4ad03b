"""LAMB (You et al. 2020), an optimizer for very large batches. It is AdamW, but the update of each parameter is scaled
by the ratio of the parameter's norm to the update's norm.

Both norms cover the whole parameter, over all ranks that share the parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raytide.actors.trainer.distributed.local_shards import local, square_sum
from raytide.actors.trainer.optim.adamw import FIRST, SECOND
from raytide.actors.trainer.optim.base import STEP, Optimizer, first_step, zeros
from raytide.actors.trainer.optim.state_offload import State


class Lamb(Optimizer):
    def first_state(self, parameter: nn.Parameter) -> State:
        return {STEP: first_step(), FIRST: zeros(parameter), SECOND: zeros(parameter)}

    def update(self, parameter: nn.Parameter, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        weight, beta1, beta2 = local(parameter), self.spec.beta1, self.spec.beta2
        step = float(state[STEP].add_(1))
        first = state[FIRST].lerp_(grad, 1 - beta1) / (1 - beta1**step)
        second = state[SECOND].mul_(beta2).addcmul_(grad, grad, value=1 - beta2) / (1 - beta2**step)
        change = first / (second.sqrt_() + self.spec.eps) + group["weight_decay"] * weight
        weight_norm, change_norm = square_sum(weight, parameter).sqrt(), square_sum(change, parameter).sqrt()
        trust = torch.where(
            (weight_norm > 0) & (change_norm > 0), weight_norm / change_norm, torch.ones_like(weight_norm)
        )
        weight.sub_(change * (group["lr"] * trust))
