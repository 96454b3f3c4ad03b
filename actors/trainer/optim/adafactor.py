"""Adafactor (Shazeer and Stern 2018). In place of a matrix's second moment it keeps only the moment's row means and
column means.

A parameter's learning rate is relative to the size of its values. The arithmetic is that of torch.optim.Adafactor,
which does not support DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raytide.actors.trainer.distributed.local_shards import local, square_sum, sum_over, without_dim
from raytide.actors.trainer.optim.base import STEP, Optimizer, first_step, zeros
from raytide.actors.trainer.optim.state_offload import State

ROW, COLUMN, SECOND = "row", "column", "exp_avg_sq"
DECAY = -0.8
MIN_SCALE = 1e-3
"""The lower bound of a parameter's root mean square, so that a parameter that starts at zero can change."""
EPS = torch.finfo(torch.float32).eps


class Adafactor(Optimizer):
    def first_state(self, parameter: nn.Parameter) -> State:
        if parameter.ndim < 2:
            return {STEP: first_step(), SECOND: zeros(parameter)}
        shard = zeros(parameter)
        return {STEP: first_step(), ROW: shard.sum(-1), COLUMN: shard.sum(-2)}  # zeros; a rank may have no rows

    def update(self, parameter: nn.Parameter, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        weight, grad = local(parameter), grad.float()
        step = float(state[STEP].add_(1))
        fresh = step**DECAY
        rate = min(group["lr"], step**-0.5)
        size = (square_sum(weight.float(), parameter) / parameter.numel()).sqrt()
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        change = grad * self._variance(parameter, grad, state, fresh).clamp_(min=EPS * EPS).rsqrt_()
        excess = (square_sum(change, parameter) / parameter.numel()).sqrt().clamp(min=1.0)
        weight.add_(change * (-rate * size.clamp(min=MIN_SCALE) / excess))

    def _variance(self, parameter: nn.Parameter, grad: Tensor, state: State, fresh: float) -> Tensor:
        squares = grad.square()
        if SECOND in state:
            state[SECOND].lerp_(squares, fresh)
            return state[SECOND].clone()
        rows, columns = parameter.ndim - 2, parameter.ndim - 1
        row_mean = sum_over(squares.sum(columns), parameter, [columns]) / parameter.shape[columns]
        column_mean = sum_over(squares.sum(rows), parameter, [rows]) / parameter.shape[rows]
        row, column = state[ROW].lerp_(row_mean, fresh), state[COLUMN].lerp_(column_mean, fresh)
        mean = sum_over(row.sum(-1, keepdim=True), parameter, [rows]) / parameter.shape[rows]
        return (row / mean.clamp(min=EPS)).unsqueeze(-1) * column.unsqueeze(-2)

    def placed(self, parameter: nn.Parameter, key: str, value: Tensor) -> Tensor:
        if key == ROW:
            return without_dim(value, parameter, parameter.ndim - 1)
        if key == COLUMN:
            return without_dim(value, parameter, parameter.ndim - 2)
        return super().placed(parameter, key, value)
