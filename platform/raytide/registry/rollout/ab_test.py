"""An A/B test of a mean, such as a score or a time. Its interval and p-value stay valid however often they are looked
at.

Requests of one user resemble each other, so the variance is measured between groups of users. With N_g requests and the
sum Y_g in group g, the mean is R = sum(Y) / sum(N). Its variance is G / (G - 1) * sum((Y_g - R N_g)^2) / sum(N)^2 for G
groups (the delta method for ratio metrics; Deng, Knoblich, Lu, 2018).

The test is the mixture sequential probability ratio test with a normal mixture of effects, N(0, tau^2) (Robbins, 1970;
Johari, Pekelis, Walsh: Always Valid Inference, 2022). For a difference D of variance V:

    Lambda = sqrt(V / (V + tau^2)) exp(D^2 tau^2 / (2 V (V + tau^2))),    p = min over all looks of 1 / Lambda.

The test relies on the central limit theorem. It therefore requires minimum numbers of requests and of groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from raytide.core.config import Config
from raytide.registry.rollout.traffic import GROUPS

_LEAST_GROUPS = 20


class AbSpec(Config):
    effect: float = Field(gt=0)
    """The smallest difference that matters, in units of the metric: tau. A wrong value makes the test slower, not
    invalid.
    """
    better: Literal["higher", "lower"] = "higher"
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """The probability that a winner is declared although the arms are equal, however often the test is looked at."""
    requests: int = Field(default=200, ge=2)
    """The least number of requests of each arm."""


@dataclass(slots=True)
class Arm:
    """The observations of one arm of the test, summed by group of users."""

    counts: list[int] = field(default_factory=lambda: [0] * GROUPS)
    sums: list[float] = field(default_factory=lambda: [0.0] * GROUPS)

    def add(self, group: int, value: float, count: int = 1) -> None:
        """Adds `count` observations with the sum `value` to a group."""
        if not math.isfinite(value):
            raise ValueError(f"{value} is no observation")
        self.counts[group] += count
        self.sums[group] += value

    @property
    def requests(self) -> int:
        return sum(self.counts)

    @property
    def groups(self) -> int:
        return sum(count > 0 for count in self.counts)

    @property
    def mean(self) -> float:
        return math.fsum(self.sums) / self.requests

    @property
    def variance(self) -> float:
        """The variance of the arm's mean."""
        mean, groups = self.mean, self.groups
        squares = math.fsum((value - mean * count) ** 2 for count, value in zip(self.counts, self.sums, strict=True))
        return groups / (groups - 1) * squares / self.requests**2


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of one look at an A/B test."""

    difference: float = 0.0
    """The mean of b minus the mean of a."""
    low: float = -math.inf
    """The lower limit of the interval that contains the true difference, at all looks together, with a probability of 1
    - alpha; `high` is the upper limit.
    """
    high: float = math.inf
    p_value: float = 1.0
    """The smallest p-value of all looks so far."""
    winner: Literal["", "a", "b"] = ""
    """The arm that won; empty while the test continues."""
    reason: str = ""


def last_look(progress: Mapping[str, Any]) -> Comparison | None:
    """Returns the result of the last look at a rollout's A/B test, from the rollout's progress. Returns None if there
    was no look yet.
    """
    kept = progress.get("test")
    return None if kept is None else Comparison(**{name: kept[name] for name in kept if kept[name] is not None})


def look(spec: AbSpec, a: Arm, b: Arm, before: Comparison | None = None) -> Comparison:
    """Returns the result of comparing the two arms now. `before` is the result of the previous look at the same test.

    A winner, once declared, never changes.
    """
    before = before or Comparison()
    for name, arm in (("a", a), ("b", b)):
        if arm.requests < spec.requests:
            return _waiting(before, f"{name} has {arm.requests} of {spec.requests} requests")
        if arm.groups < _LEAST_GROUPS:
            return _waiting(before, f"{name} has users in {arm.groups} groups; {_LEAST_GROUPS} are needed")
    difference, variance = b.mean - a.mean, a.variance + b.variance
    if variance <= (1e-12 * max(abs(a.mean), abs(b.mean))) ** 2:  # no more than rounding errors
        return _waiting(before, "all observations are equal")
    tau2 = spec.effect**2
    total = variance + tau2
    log_lambda = 0.5 * math.log(variance / total) + difference**2 * tau2 / (2.0 * variance * total)
    p_value = min(before.p_value, math.exp(-max(0.0, log_lambda)))
    radius = math.sqrt(variance * total / tau2 * (2.0 * math.log(1.0 / spec.alpha) + math.log(total / variance)))
    winner = before.winner
    if not winner and p_value <= spec.alpha:
        winner = "b" if (difference > 0) is (spec.better == "higher") else "a"
    reason = f"{winner} is better" if winner else "no difference is proven yet"
    return Comparison(difference, difference - radius, difference + radius, p_value, winner, reason)


def _waiting(before: Comparison, reason: str) -> Comparison:
    return (
        before
        if before.winner
        else Comparison(before.difference, before.low, before.high, before.p_value, reason=reason)
    )
