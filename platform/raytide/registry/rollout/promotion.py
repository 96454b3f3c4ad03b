"""Decides whether a challenger replaces the champion. A rule states conditions on the metrics of the challenger and the
champion, and on the result of the A/B test between the two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from raytide.core.specs.model_version import MetricRule, PromotionRule
from raytide.registry.rollout.ab_test import Comparison


@dataclass(frozen=True, slots=True)
class PromotionDecision:
    promotes: bool
    reasons: tuple[str, ...]
    """The conditions that hold, if the challenger is promoted; else the conditions that do not."""


def decide_promotion(
    rule: PromotionRule,
    champion: Mapping[str, float] | None,
    challenger: Mapping[str, float],
    online: Comparison | None = None,
) -> PromotionDecision:
    """Returns whether the challenger replaces the champion, and why. The challenger is arm b of the A/B test `online`.

    `champion` contains the champion's metrics. If it is None there is no champion yet: conditions on an improvement
    count as met, but absolute limits still apply.
    """
    held: list[str] = []
    broken: list[str] = []
    for name, metric in rule.metrics.items():
        for text, holds in _checks(name, metric, champion, challenger):
            (held if holds else broken).append(text)
    if rule.online != "ignored" and champion is not None:
        winner = online.winner if online is not None else ""
        holds = winner == "b" if rule.online == "better" else online is not None and winner != "a"
        shown = {"a": "the champion won", "b": "the challenger won"}.get(winner, "no difference was proven")
        text = f"A/B test: {shown if online is not None else 'there is none'}"
        (held if holds else broken).append(text)
    return PromotionDecision(not broken, tuple(broken or held))


def _checks(
    name: str, rule: MetricRule, champion: Mapping[str, float] | None, challenger: Mapping[str, float]
) -> list[tuple[str, bool]]:
    if name not in challenger:
        return [(f"{name}: the challenger was not evaluated", False)]
    sign, value = (1.0 if rule.better == "higher" else -1.0), challenger[name]
    checks = []
    if rule.limit is not None:
        word = "at least" if rule.better == "higher" else "at most"
        checks.append((f"{name}: {value:g}, wanted {word} {rule.limit:g}", _reaches(sign * value, sign * rule.limit)))
    if rule.gain is not None and champion is not None:
        if name not in champion:
            return [*checks, (f"{name}: the champion was not evaluated", False)]
        gain = sign * (value - champion[name])
        checks.append((f"{name}: {gain:+g} over the champion's {champion[name]:g}", _reaches(gain, rule.gain)))
    return checks


def _reaches(value: float, wanted: float) -> bool:
    """Returns whether `value` is at least `wanted`, up to rounding errors: 12.0 - 11.9 counts as a gain of 0.1."""
    return value >= wanted or math.isclose(value, wanted, rel_tol=1e-9, abs_tol=1e-12)
