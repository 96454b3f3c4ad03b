"""AdamW and its learning rate, which is a function of the step and so needs no state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from raytide.core.train_spec import OptimSpec


def build(parts: Sequence[nn.Module], spec: OptimSpec) -> torch.optim.Optimizer:
    weights = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in weights if parameter.ndim >= 2]
    vectors = [parameter for parameter in weights if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": spec.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=spec.lr, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)


def lr_at(step: int, steps: int, spec: OptimSpec) -> float:
    """The rate of the step with this number, counted from 0: linear warm-up, then a cosine down to min_lr_ratio."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    done = (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps)
    floor = spec.lr * spec.min_lr_ratio
    return floor + (spec.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class State:
    """What a checkpoint keeps of a torch optimizer."""

    def __init__(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = {id(weight): name for part in parts for name, weight in part.named_parameters()}
        _initialise(optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, value in self._values():
            found.setdefault(name, value)
        return found

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """They were written in place, but for the twin of a tied weight: two stages on one rank have it by one name."""
        for name, value in self._values():
            if value is not tensors[name]:
                value.copy_(tensors[name])

    def _values(self) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._optimizer.param_groups:
            for weight in group["params"]:
                for key, value in self._optimizer.state[weight].items():
                    yield f"{self._names[id(weight)]}.{key}", value


def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer its state by a step that changes nothing: no gradient, no learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        state["step"].zero_()
