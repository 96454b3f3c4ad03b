"""Queries on time series as expression trees, and their translation to PromQL.

`raytide.dashboards.rules.evaluation` computes these trees over stored series.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from raytide.core.telemetry.metrics import Metric

MatchOp = Literal["=", "!=", "=~", "!~"]
CompareOp = Literal[">", "<", ">=", "<=", "==", "!="]
OverTimeOp = Literal["avg", "max", "min", "sum", "count", "last", "stddev", "changes", "increase"]


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label. The patterns of `=~` and `!~` must match the whole value."""

    label: str
    op: MatchOp
    value: str


@dataclass(frozen=True, slots=True)
class Selector:
    """The last value of each series of a metric. A series without a value in the last five minutes is left out."""

    metric: str
    where: tuple[Matcher, ...] = ()


@dataclass(frozen=True, slots=True)
class Rate:
    """The increase of each counter per second in a window, extrapolated to the window's ends as in Prometheus."""

    series: Selector
    window_s: int


@dataclass(frozen=True, slots=True)
class OverTime:
    """A statistic, such as the average, over the values that each series has in a window."""

    op: OverTimeOp
    series: Selector
    window_s: int


@dataclass(frozen=True, slots=True)
class PredictLinear:
    """The predicted value of a gauge `ahead_s` from now, by the least-squares line through its values in a window."""

    series: Selector
    window_s: int
    ahead_s: int


@dataclass(frozen=True, slots=True)
class Aggregation:
    """An aggregate, such as the sum, over all values that agree in the labels `by`."""

    op: Literal["sum", "max", "min", "avg", "count"]
    of: Expression
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of the values that a histogram observed in a window, estimated from the histogram's buckets."""

    q: float
    histogram: Selector
    """A selector with the histogram's name, without `_bucket`."""
    window_s: int
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of two expressions, between values with equal labels. Division by zero gives infinity or NaN."""

    left: Expression
    op: Literal["+", "-", "*", "/"]
    right: Expression | float


@dataclass(frozen=True, slots=True)
class Condition:
    """The values of the left side for which a comparison holds.

    A left value is compared with a number, or with the value on the right side that has equal labels.
    """

    left: Expression
    op: CompareOp
    right: Expression | float


@dataclass(frozen=True, slots=True)
class SetOperation:
    """A combination of two sets of values by their labels.

    - `and`: left values whose labels exist on the right.
    - `or`: all left values, and right values whose labels do not exist on the left.
    - `unless`: left values whose labels do not exist on the right.
    """

    left: Expression
    op: Literal["and", "or", "unless"]
    right: Expression
    on: tuple[str, ...] | None = None
    """Compares only these labels."""


@dataclass(frozen=True, slots=True)
class Absent:
    """The value 1 if the selector finds no series, otherwise nothing. Its labels are those that the selector's `where`
    requires.
    """

    series: Selector


@dataclass(frozen=True, slots=True)
class Recorded:
    """The result of a recording rule. Prometheus reads the recorded series. raytide's evaluator computes the expression
    anew.
    """

    name: str
    expression: Expression


Expression = (
    Selector
    | Rate
    | OverTime
    | PredictLinear
    | Aggregation
    | Quantile
    | Arithmetic
    | Condition
    | SetOperation
    | Absent
    | Recorded
)


def matching(**labels: str | tuple[str, ...]) -> tuple[Matcher, ...]:
    """Returns matchers that require each label to equal its value. A tuple means that any of its values may match.

    Values in a tuple must not contain characters that are special in regular expressions.
    """
    return tuple(
        Matcher(label, "=", value) if isinstance(value, str) else Matcher(label, "=~", "|".join(value))
        for label, value in labels.items()
    )


def select(metric: Metric, *where: Matcher, **labels: str | tuple[str, ...]) -> Selector:
    """Returns a selector for a metric of raytide's catalogue. The selector uses the metric's name as metrics pages show
    it.

    Raises ValueError for a label that the metric does not have.
    """
    matchers = (*where, *matching(**labels))
    if unknown := {each.label for each in matchers} - {*metric.labels, "job", "instance"}:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}")
    return Selector(metric.exposed_name, matchers)


def sum_by(of: Expression, *by: str) -> Aggregation:
    return Aggregation("sum", of, by)


def max_by(of: Expression, *by: str) -> Aggregation:
    return Aggregation("max", of, by)


def min_by(of: Expression, *by: str) -> Aggregation:
    return Aggregation("min", of, by)


def average_by(of: Expression, *by: str) -> Aggregation:
    return Aggregation("avg", of, by)


def ratio(part: Expression, whole: Expression) -> Arithmetic:
    return Arithmetic(part, "/", whole)


def to_promql(expression: Expression, window: str = "") -> str:
    """Returns the PromQL of a tree. If `window` is given (such as Grafana's `$__rate_interval`), it replaces every
    window in the tree.
    """

    def promql(each: Expression) -> str:
        return to_promql(each, window)

    def during(selected: Selector, window_s: int) -> str:
        return f"{promql(selected)}[{window or duration(window_s)}]"

    match expression:
        case Selector(metric, where):
            return metric + _selector(where)
        case Rate(counters, window_s):
            return f"rate({during(counters, window_s)})"
        case OverTime(op, values, window_s):
            function = op if op in ("changes", "increase") else f"{op}_over_time"
            return f"{function}({during(values, window_s)})"
        case PredictLinear(values, window_s, ahead_s):
            return f"predict_linear({during(values, window_s)}, {ahead_s})"
        case Aggregation(op, of, by):
            return f"{op}{_by(by)}({promql(of)})"
        case Quantile(q, histogram, window_s, by):
            buckets = replace(histogram, metric=f"{histogram.metric}_bucket")
            return f"histogram_quantile({_number(q)}, sum by (le{_more(by)}) (rate({during(buckets, window_s)})))"
        case Arithmetic(left, op, right) | Condition(left, op, right):
            return f"{_operand(left, promql)} {op} {_operand(right, promql)}"
        case SetOperation(left, op, right, on):
            matched = "" if on is None else f" on ({', '.join(on)})"
            return f"{_operand(left, promql)} {op}{matched} {_operand(right, promql)}"
        case Absent(selected):
            return f"absent({promql(selected)})"
        case Recorded(name, _):
            return name


def map_series(expression: Expression, change: Callable[[Selector], Selector]) -> Expression:
    """Returns the tree with every selector replaced by `change(selector)`. A `Recorded` is left as it is."""

    def mapped(each: Expression | float) -> Expression:
        return each if isinstance(each, int | float) else map_series(each, change)  # type: ignore[return-value]

    match expression:
        case Selector():
            return change(expression)
        case Rate() | OverTime() | PredictLinear() | Absent():
            return replace(expression, series=change(expression.series))
        case Quantile():
            return replace(expression, histogram=change(expression.histogram))
        case Aggregation():
            return replace(expression, of=mapped(expression.of))
        case Arithmetic() | Condition() | SetOperation():
            return replace(expression, left=mapped(expression.left), right=mapped(expression.right))
        case Recorded():
            return expression


def duration(seconds: int) -> str:
    """Returns a duration in Prometheus' notation, in the largest unit that divides it: 300 seconds are `5m`."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % length == 0:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _operand(side: Expression | float, promql: Callable[[Expression], str]) -> str:
    if isinstance(side, int | float):
        return _number(side)
    return f"({promql(side)})" if isinstance(side, Arithmetic | Condition | SetOperation) else promql(side)


def _selector(where: tuple[Matcher, ...]) -> str:
    return "{" + ", ".join(f"{each.label}{each.op}{_quoted(each.value)}" for each in where) + "}" if where else ""


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


def _more(labels: tuple[str, ...]) -> str:
    return "".join(f", {label}" for label in labels)


def _number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))
