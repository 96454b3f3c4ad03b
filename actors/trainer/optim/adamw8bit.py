"""AdamW with one byte per moment (Dettmers et al. 2021). Moments are divided into blocks, and each block is scaled by
its largest magnitude. The scaled values are coded with a table whose steps are smallest near zero.

Blocks lie within rows, so that a row-wise shard has the same blocks as the whole. Small tensors and vectors keep
fp32. Moments that are dequantized and quantized again keep the same codes, so that a resume is exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from raytide.actors.trainer.distributed.local_shards import local
from raytide.actors.trainer.optim.adamw import FIRST, SECOND, AdamW
from raytide.actors.trainer.optim.base import STEP, Optimizer, first_step, zeros
from raytide.actors.trainer.optim.state_offload import State

BLOCK = 256
MIN_SIZE = 4096
"""The size, in weights, of the smallest tensor that is quantized; below it, the saving is not worth the error."""
SMALLEST = 1e-30
"""Blocks whose largest value is below this become zero, since fp32 could not hold their codes times their scale."""
SCALE = "_scale"


class AdamW8bit(AdamW):
    def first_state(self, parameter: nn.Parameter) -> State:
        if parameter.ndim < 2 or parameter.numel() < MIN_SIZE:
            return super().first_state(parameter)
        state = {STEP: first_step(local(parameter).device)}
        for key in (FIRST, SECOND):
            state[key], state[key + SCALE] = quantize(zeros(parameter), signed=key == FIRST)
        return state

    def step_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        Optimizer.step_group(self, parameters, group)  # one by one, so that only one parameter's moments are in fp32

    def update(self, parameter: nn.Parameter, grad: Tensor, state: State, group: dict[str, Any]) -> None:
        wide = _wide(state)
        super().update(parameter, grad, wide, group)
        for key in wide.keys() - {STEP}:
            self.from_full_precision(state, key, wide[key])

    def checkpoint_keys(self, state: State) -> list[str]:
        return [key for key in state if not key.endswith(SCALE)]

    def to_full_precision(self, state: State) -> State:
        return _wide(state)

    def from_full_precision(self, state: State, key: str, value: Tensor) -> None:
        if key + SCALE not in state:
            super().from_full_precision(state, key, value)
            return
        codes, scales = quantize(value, signed=key == FIRST)
        state[key].copy_(codes)
        state[key + SCALE].copy_(scales)


def quantize(value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Returns the codes [..., D] in uint8, and the scales [..., ceil(D / BLOCK)], one for each block."""
    blocks = _blocks(value.float())
    scales = blocks.abs().amax(-1) if blocks.numel() else blocks.new_zeros(blocks.shape[:-1])
    scales = torch.where(scales < SMALLEST, 0.0, scales)
    table = _table(signed, value.device)
    between = (table[1:] + table[:-1]) / 2
    relative = torch.where(scales.unsqueeze(-1) > 0, blocks / scales.unsqueeze(-1), 0.0)
    codes = torch.bucketize(relative, between)
    return codes.to(torch.uint8).flatten(-2)[..., : value.shape[-1]].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    wide: Tensor = _table(signed, codes.device)[_blocks(codes).int()] * scales.unsqueeze(-1)
    out: Tensor = wide.flatten(-2)[..., : codes.shape[-1]].contiguous()
    return out


def _wide(state: State) -> State:
    return {
        key: dequantize(value, state[key + SCALE], signed=key == FIRST) if key + SCALE in state else value
        for key, value in state.items()
        if not key.endswith(SCALE)
    }


def _blocks(value: Tensor) -> Tensor:
    """Returns a tensor [..., D] as [..., blocks, BLOCK]; the last block is padded with zeros."""
    size = min(BLOCK, value.shape[-1])
    fill = -value.shape[-1] % size
    full = nn.functional.pad(value, (0, fill)) if fill else value
    return full.view(*value.shape[:-1], full.shape[-1] // size, size)  # not -1: a rank may have no rows


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """Returns the 256 values of the dynamic tree: seven decades, each with twice as many steps as the next smaller one.
    The ends are exactly 1 and, if signed, -1, so that a block's largest magnitude is preserved.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    table = torch.tensor(sorted(values), dtype=torch.float32)
    if signed:
        table[0] = -1.0
    return table.to(device)
