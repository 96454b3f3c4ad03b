"""Asynchronous successive halving (ASHA) as a pure function of the metric values that trials have reached."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from raytide.workflows.sweep.spec import HalvingSpec

Curve = Sequence[tuple[int, float]]
"""The values of a metric: (step, value), by step."""
Rungs = Mapping[int, float | None]
"""The value of a trial at each rung that it has reached; None for a value that was not finite."""
_WINDOW = 0.1


def reached(curve: Curve, rungs: Iterable[int]) -> dict[int, float | None]:
    """Returns the metric's value at each rung that the curve has passed. A rung is a step at which trials are compared.

    The value is the mean over the last tenth of the steps before the rung, because the loss of a single batch is noisy.
    """
    found: dict[int, float | None] = {}
    last = curve[-1][0] if curve else 0
    for rung in rungs:
        if last < rung:
            break
        found[rung] = smoothed(curve, rung)
    return found


def smoothed(curve: Curve, step: int) -> float | None:
    """Returns the mean of the values in the last tenth of the steps up to `step`.

    If this range contains no values, the result is the last value before the range. If there is no earlier value
    either, the result is the first value of the curve. Returns None if the curve is empty or a value is not finite.
    """
    before = [(at, value) for at, value in curve if at <= step]
    near = [value for at, value in before if at > step - max(1, round(_WINDOW * step))]
    near = near or [value for _, value in before[-1:] or curve[:1]]  # a script reports now and then
    return sum(near) / len(near) if near and all(map(math.isfinite, near)) else None


def goes_on(
    value: float | None, others: Iterable[float | None], spec: HalvingSpec, mode: Literal["min", "max"]
) -> bool:
    """Returns whether a trial with this value at a rung may continue. It may if the value is among the best `1 /
    factor` of the trials that have reached the rung.

    `others` are the values of all other trials at the rung. At least one trial continues. All continue until more than
    `spec.least` trials have reached the rung. A value that is not finite counts as the worst.
    """
    known = [_rank(each, mode) for each in others]
    own = _rank(value, mode)
    if len(known) + 1 <= max(spec.least, 1):
        return True
    best = max(1, (len(known) + 1) // spec.factor)
    return sum(1 for each in known if each < own) < best


def rung_of_end(own: Rungs, others: Iterable[Rungs], spec: HalvingSpec, mode: Literal["min", "max"]) -> int | None:
    """Returns the rung at which a trial ends. Returns None if the trial continues.

    At its highest rung, a trial is compared with all trials that have reached this rung by now. A trial that continued
    because it was the only one is thus compared again when others arrive.
    """
    if not own:
        return None
    rung = max(own)
    beside = [each[rung] for each in others if rung in each]
    return None if goes_on(own[rung], beside, spec, mode) else rung


def _rank(value: float | None, mode: Literal["min", "max"]) -> float:
    if value is None or not math.isfinite(value):
        return math.inf
    return value if mode == "min" else -value
