"""The learning rate as a stateless function of the step."""

from __future__ import annotations

import math

from raytide.core.specs.train import OptimSpec


def lr_at(step: int, steps: int, spec: OptimSpec) -> float:
    """Returns the learning rate of step number `step`, counted from 0, in a run of `steps` steps."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    floor = spec.lr * spec.min_lr_ratio
    if spec.schedule == "constant":
        return spec.lr
    first = spec.warmup_steps
    if spec.schedule == "wsd":
        first = max(first, steps - 1 - math.ceil(spec.decay_ratio * steps))
    done = min(1.0, max(0.0, (step - first) / max(1, steps - 1 - first)))
    if spec.schedule == "cosine":
        return floor + (spec.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr - (spec.lr - floor) * done
