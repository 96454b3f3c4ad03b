"""Computes expression trees over stored series. The results equal those of Prometheus 2 for the trees' PromQL.

tests/dashboards/rules/test_evaluation.py compares them with a real Prometheus.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from raytide.dashboards.history.points import bucket_quantile
from raytide.dashboards.rules.expressions import (
    Absent,
    Aggregation,
    Arithmetic,
    CompareOp,
    Condition,
    Expression,
    Matcher,
    OverTime,
    OverTimeOp,
    PredictLinear,
    Quantile,
    Rate,
    Recorded,
    Selector,
    SetOperation,
)

Labels = tuple[tuple[str, str], ...]
"""Names and values of labels, sorted by name, without empty values and without the metric's name."""
Point = tuple[float, float | None]
"""A time and a value. None marks the end of a series whose target went away, as Prometheus' staleness marker does."""
Vector = dict[Labels, float]

_LOOKBACK_S = 300.0


class SeriesSource(Protocol):
    """A source of stored series, such as the history or a test's dictionary."""

    def range(
        self, metric: str, where: Sequence[Matcher], start_s: float, end_s: float
    ) -> Iterable[tuple[Labels, Sequence[Point]]]:
        """Returns the series of a metric that satisfy the matchers `where`. Their points lie from `start_s` to `end_s`
        inclusive, in order of time.
        """


def evaluate(expression: Expression, source: SeriesSource, at_s: float) -> Vector:
    """Returns the value of the expression at the time `at_s`, for each set of labels."""
    match expression:
        case Selector():
            return _instant(expression, source, at_s)
        case Rate(counters, window_s):
            return _over(counters, source, at_s, window_s, lambda points: _rate(points, at_s, window_s))
        case OverTime(statistic, values, window_s):
            return _over(values, source, at_s, window_s, lambda points: _statistic(statistic, points, at_s, window_s))
        case PredictLinear(values, window_s, ahead_s):
            return _over(values, source, at_s, window_s, lambda points: _predicted(points, at_s, ahead_s))
        case Aggregation(op, of, by):
            return _aggregated(op, evaluate(of, source, at_s), by)
        case Quantile():
            return _quantiles(expression, source, at_s)
        case Arithmetic(left, op, right):
            combine = _ARITHMETIC[op]
            return {labels: combine(a, b) for labels, a, b in _pairs(left, right, source, at_s)}
        case Condition(left, op, right):
            holds = _COMPARISONS[op]
            return {labels: a for labels, a, b in _pairs(left, right, source, at_s) if holds(a, b)}
        case SetOperation():
            return _set_operation(expression, source, at_s)
        case Absent(selected):
            return {} if _instant(selected, source, at_s) else {_required(selected.where): 1.0}
        case Recorded(_, recorded):
            return evaluate(recorded, source, at_s)


def matches(labels: Mapping[str, str], where: Iterable[Matcher]) -> bool:
    """Returns whether the labels satisfy all matchers. A missing label counts as an empty one."""
    for each in where:
        value = labels.get(each.label, "")
        is_equal = value == each.value if each.op in ("=", "!=") else _pattern(each.value).fullmatch(value) is not None
        if is_equal != (each.op in ("=", "=~")):
            return False
    return True


@lru_cache(maxsize=256)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


def _instant(selected: Selector, source: SeriesSource, at_s: float) -> Vector:
    found: Vector = {}
    for labels, points in source.range(selected.metric, selected.where, at_s - _LOOKBACK_S, at_s):
        if points and (value := points[-1][1]) is not None:
            found[labels] = value
    return found


def _over(
    selected: Selector,
    source: SeriesSource,
    at_s: float,
    window_s: float,
    function: Callable[[list[tuple[float, float]]], float | None],
) -> Vector:
    found: Vector = {}
    for labels, points in source.range(selected.metric, selected.where, at_s - window_s, at_s):
        known = [(time_s, value) for time_s, value in points if value is not None]
        if known and (result := function(known)) is not None:
            found[labels] = result
    return found


def _rate(points: list[tuple[float, float]], at_s: float, window_s: float) -> float | None:
    increase = _increase(points, at_s, window_s)
    return None if increase is None else increase / window_s


def _increase(points: list[tuple[float, float]], at_s: float, window_s: float) -> float | None:
    """Returns Prometheus' `extrapolatedRate` times the window: the increase from the first to the last sample,
    corrected for resets. On each side it is extrapolated to the window's end if that is near, else by half a sample
    interval; never to where the counter would be negative.
    """
    if len(points) < 2:
        return None
    (first_s, first), (last_s, last) = points[0], points[-1]
    increase = last - first
    for (_, before), (_, after) in pairwise(points):
        if after < before:
            increase += before
    sampled_s = last_s - first_s
    between_s = sampled_s / (len(points) - 1)
    to_start_s, to_end_s = first_s - (at_s - window_s), at_s - last_s
    if increase > 0 and first >= 0:
        to_start_s = min(to_start_s, sampled_s * (first / increase))
    near_s = 1.1 * between_s
    covered_s = sampled_s
    covered_s += to_start_s if to_start_s < near_s else between_s / 2
    covered_s += to_end_s if to_end_s < near_s else between_s / 2
    return increase * (covered_s / sampled_s)


def _statistic(op: OverTimeOp, points: list[tuple[float, float]], at_s: float, window_s: float) -> float | None:
    values = [value for _, value in points]
    match op:
        case "increase":
            return _increase(points, at_s, window_s)
        case "changes":
            pairs = pairwise(values)
            return float(sum(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in pairs))
        case "avg":
            return _mean(values)
        case "max":
            return _largest(values)
        case "min":
            return -_largest([-value for value in values])
        case "sum":
            return sum(values)
        case "count":
            return float(len(values))
        case "last":
            return values[-1]
        case "stddev":
            return math.sqrt(_mean([(value - _mean(values)) ** 2 for value in values]))


def _predicted(points: list[tuple[float, float]], at_s: float, ahead_s: float) -> float | None:
    if len(points) < 2:
        return None
    if all(value == points[0][1] for _, value in points):
        return points[0][1]
    times = [time_s - at_s for time_s, _ in points]
    values = [value for _, value in points]
    mean_time, mean_value = _mean(times), _mean(values)
    covariance = sum((t - mean_time) * (v - mean_value) for t, v in zip(times, values, strict=True))
    slope = covariance / sum((t - mean_time) ** 2 for t in times)
    return mean_value + slope * (ahead_s - mean_time)


def _aggregated(op: str, values: Vector, by: tuple[str, ...]) -> Vector:
    groups: defaultdict[Labels, list[float]] = defaultdict(list)
    for labels, value in values.items():
        groups[_only(labels, by)].append(value)
    return {labels: _AGGREGATES[op](group) for labels, group in groups.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _largest(values: Sequence[float]) -> float:
    """Returns the largest value that is a number; NaN if none is."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _quantiles(wanted: Quantile, source: SeriesSource, at_s: float) -> Vector:
    buckets = Selector(f"{wanted.histogram.metric}_bucket", wanted.histogram.where)
    rates = evaluate(Aggregation("sum", Rate(buckets, wanted.window_s), ("le", *wanted.by)), source, at_s)
    histograms: defaultdict[Labels, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    for labels, rate in rates.items():
        bounds = dict(labels)
        if bound := bounds.pop("le", ""):
            histograms[tuple(bounds.items())][float(bound)] += rate
    return {labels: bucket_quantile(wanted.q, counts) for labels, counts in histograms.items()}


def _pairs(
    left: Expression, right: Expression | float, source: SeriesSource, at_s: float
) -> Iterator[tuple[Labels, float, float]]:
    values = evaluate(left, source, at_s)
    if isinstance(right, int | float):
        yield from ((labels, value, right) for labels, value in values.items())
        return
    others = evaluate(right, source, at_s)
    yield from ((labels, value, others[labels]) for labels, value in values.items() if labels in others)


def _set_operation(operation: SetOperation, source: SeriesSource, at_s: float) -> Vector:
    left, right = evaluate(operation.left, source, at_s), evaluate(operation.right, source, at_s)

    def key(labels: Labels) -> Labels:
        return labels if operation.on is None else _only(labels, operation.on)

    match operation.op:
        case "and":
            keys = {key(labels) for labels in right}
            return {labels: value for labels, value in left.items() if key(labels) in keys}
        case "unless":
            keys = {key(labels) for labels in right}
            return {labels: value for labels, value in left.items() if key(labels) not in keys}
        case "or":
            keys = {key(labels) for labels in left}
            return left | {labels: value for labels, value in right.items() if key(labels) not in keys}


def _only(labels: Labels, names: tuple[str, ...]) -> Labels:
    return tuple((name, value) for name, value in labels if name in names)


def _required(where: Sequence[Matcher]) -> Labels:
    return tuple(sorted((each.label, each.value) for each in where if each.op == "="))


def _divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
}
_COMPARISONS: dict[CompareOp, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}
_AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "max": _largest,
    "min": lambda values: -_largest([-value for value in values]),
    "avg": _mean,
    "count": lambda values: float(len(values)),
}
