"""A canary rollout: the challenger gets more traffic step by step. If the challenger proves worse than the champion,
the rollout is rolled back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field, model_validator

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.specs.rollout import MOST_METRICS, MetricLimit, MetricName
from raytide.registry.rollout.share_test import BadShare, ShareTest

Criterion = Literal["errors", "late", "disliked"]
CRITERIA: tuple[Criterion, ...] = ("errors", "late", "disliked")
_METRIC = "metric "
"""The prefix of a metric's criterion, so that a metric may have the name of another criterion."""
Action = Literal["hold", "advance", "complete", "roll_back"]
_NAMES = {"errors": "failed requests", "late": "late first tokens", "disliked": "disliked answers"}


class CanaryStep(Config):
    percent: float = Field(gt=0, le=100)
    """The challenger's share of traffic."""
    for_s: bounds.Seconds = 60.0
    """The least seconds that the step lasts."""
    requests: int = Field(default=100, ge=1)
    """The least number of requests that the challenger must have had in the step."""


class CanarySpec(Config):
    """The steps of a canary, and the criteria that end it."""

    steps: tuple[CanaryStep, ...] = Field(
        default=tuple(CanaryStep(percent=percent) for percent in (5, 25, 50, 100)), min_length=1, max_length=100
    )
    alpha: float = Field(default=0.001, gt=0, lt=0.5)
    """The probability that a challenger which is no worse than the champion is rolled back, however long the canary
    lasts. A step of 100 % may add as much again.
    """
    tolerance: float = Field(default=0.005, ge=0, lt=1)
    """The accepted excess over the champion's share of failed, late or disliked requests: a real but smaller excess
    does not end the canary.
    """
    metrics: dict[MetricName, MetricLimit] = Field(default_factory=dict, max_length=MOST_METRICS)
    """The metrics that users report for answers, with the limits of their good values."""

    @model_validator(mode="after")
    def _rises(self) -> CanarySpec:
        percents = [step.percent for step in self.steps]
        if percents != sorted(set(percents)):
            raise ValueError("the steps' percents must rise")
        return self


@dataclass(frozen=True, slots=True)
class RevisionCounts:
    """The outcomes of one revision's requests since the last report."""

    requests: int = 0
    errors: int = 0
    """The number of requests that failed through the server's fault; refusals and clients that left do not count."""
    started: int = 0
    """The number of requests that got a first token, or waited for it longer than the SLO."""
    late: int = 0
    """The number of requests in `started` whose first token came later than the SLO."""
    judged: int = 0
    """The number of answers with a quality score: a thumb, or a judge's verdict."""
    disliked: int = 0
    metrics: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The number of values and of the bad ones, by metric."""

    def share(self, criterion: str) -> BadShare:
        """Returns the number of observations for a criterion, and how many of them are bad. A criterion is one of
        CRITERIA, or a metric.
        """
        if criterion == "errors":
            return BadShare(self.requests, self.errors)
        if criterion == "late":
            return BadShare(self.started, self.late)
        if criterion == "disliked":
            return BadShare(self.judged, self.disliked)
        return BadShare(*self.metrics.get(criterion.removeprefix(_METRIC), (0, 0)))


@dataclass(frozen=True, slots=True)
class CanaryState:
    step: int
    since_s: float
    """The time at which the step began."""
    requests: int = 0
    """The number of the challenger's requests in this step."""
    tests: Mapping[str, ShareTest] = field(default_factory=lambda: dict.fromkeys(CRITERIA, ShareTest()))
    """The sequential tests by criterion."""


@dataclass(frozen=True, slots=True)
class CanaryDecision:
    action: Action
    percent: float
    """The challenger's share of traffic from now on."""
    reason: str


def begin(spec: CanarySpec, now_s: float) -> tuple[CanaryState, CanaryDecision]:
    percent = spec.steps[0].percent
    tests = dict.fromkeys((*CRITERIA, *(_METRIC + name for name in spec.metrics)), ShareTest())
    return CanaryState(0, now_s, tests=tests), CanaryDecision("advance", percent, f"begins with {percent:g} %")


def decide(
    spec: CanarySpec, state: CanaryState, champion: RevisionCounts, challenger: RevisionCounts, now_s: float
) -> tuple[CanaryState, CanaryDecision]:
    """Returns the next state and the decision. The counts cover the time since the last call.

    The end of the last step completes the rollout. In a step of 100 % the champion gets no requests. The challenger's
    share of bad observations is then compared with the upper confidence limit of the champion's earlier share.
    """
    step = spec.steps[state.step]
    tests = {
        criterion: _updated(test, champion.share(criterion), challenger.share(criterion), spec)
        for criterion, test in state.tests.items()
    }
    state = replace(state, tests=tests, requests=state.requests + challenger.requests)
    for criterion in regressions(spec, state):
        test, bad = tests[criterion], _NAMES.get(criterion) or f"bad values of {criterion}"
        why = f"{test.b.mean:.1%} {bad} in {test.b.total}, against {test.a.mean:.1%} of the champion"
        return state, CanaryDecision("roll_back", 0.0, why)
    left_s, left = state.since_s + step.for_s - now_s, step.requests - state.requests
    if left_s > 0 or left > 0:
        missing = [f"{left_s:.0f} s"] * (left_s > 0) + [f"{left} requests"] * (left > 0)
        return state, CanaryDecision("hold", step.percent, f"{step.percent:g} % for another {' and '.join(missing)}")
    if state.step + 1 == len(spec.steps):
        return state, CanaryDecision("complete", 100.0, "all steps passed")
    following = spec.steps[state.step + 1].percent
    state = replace(state, step=state.step + 1, since_s=now_s, requests=0)
    return state, CanaryDecision("advance", following, f"{step.percent:g} % passed")


def regressions(spec: CanarySpec, state: CanaryState) -> dict[str, float]:
    """Returns the criteria by which the challenger is proven worse. Each criterion maps to the excess, which is the
    challenger's share of bad observations minus the champion's.
    """
    limit = len(state.tests) / spec.alpha
    return {
        criterion: test.excess
        for criterion, test in state.tests.items()
        if test.e_value >= limit and test.excess > spec.tolerance
    }


def _updated(test: ShareTest, champion: BadShare, challenger: BadShare, spec: CanarySpec) -> ShareTest:
    if champion.total or not test.a.total:
        return test.updated(champion, challenger)
    return test.against(test.a.upper(spec.alpha) + spec.tolerance, challenger)
