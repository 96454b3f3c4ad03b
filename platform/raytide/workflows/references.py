"""References between stages: `${train.model}` in specs, and `eval.loss < 4` in conditions."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Self

_REFERENCE = re.compile(r"\$\{([^}]*)\}")
_PATH = re.compile(r"[A-Za-z][\w-]*(\.[A-Za-z_][\w-]*)+")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_METRIC = r"[a-z][a-z0-9_-]*\.[A-Za-z_][\w./-]*"
_CONDITION = re.compile(
    rf"\s*(?P<metric>{_METRIC})\s*(?P<sign><=|>=|==|!=|<|>)\s*"
    rf"(?:(?P<number>{_NUMBER})|(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<other>{_METRIC}))\s*"
)
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
PARAMS = "params"
METRICS = "metrics"


class Reference(NamedTuple):
    """A reference in a spec: `${STAGE.OUTPUT}`, `${STAGE.metrics.NAME}` or `${params.NAME}`."""

    stage: str
    """`params` for a parameter of the flow."""
    name: str
    """The output, or `metrics.NAME`."""

    def __str__(self) -> str:
        return f"${{{self.stage}.{self.name}}}"


class MetricCondition(NamedTuple):
    """A condition that compares a stage's metric with a number, or with another stage's metric times a factor."""

    text: str
    metric: tuple[str, str]
    """The stage and the metric's name."""
    sign: str
    number: float
    """The number, or the factor of `other`."""
    other: tuple[str, str] | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the text of a condition. Raises ValueError if the text is not a condition."""
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text[:200]!r} is no condition: write `eval.loss < 4.2` or `eval.loss <= 0.98 * old.loss`"
            )
        number = float(found["number"] or found["factor"] or 1.0)
        other = None if found["other"] is None else _split(found["other"])
        return cls(text.strip(), _split(found["metric"]), found["sign"], number, other)

    @property
    def stages(self) -> tuple[str, ...]:
        return (self.metric[0],) if self.other is None else (self.metric[0], self.other[0])

    def broken_by(self, metrics: Callable[[str, str], float]) -> str:
        """Returns the reason why the condition does not hold. The reason is empty if it holds.

        `metrics(stage, name)` returns the value of a metric. A condition on NaN never holds.
        """
        value = metrics(*self.metric)
        limit = self.number if self.other is None else self.number * metrics(*self.other)
        if not math.isnan(value) and not math.isnan(limit) and _SIGNS[self.sign](value, limit):
            return ""
        against = "" if self.other is None else f" (that is {limit:g})"
        return f"{'.'.join(self.metric)} is {value:g}, and the condition is {self.text}{against}"


def references_in(value: object) -> Iterator[Reference]:
    """Yields the references in a spec, in the order of the spec. Raises ValueError for a malformed reference."""
    if isinstance(value, str):
        for found in _REFERENCE.finditer(value):
            if not _PATH.fullmatch(found[1]):
                raise ValueError(f"{found[0]} is no reference: write ${{STAGE.OUTPUT}} or ${{params.NAME}}")
            stage, _, name = found[1].partition(".")
            yield Reference(stage, name)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from references_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from references_in(each)


def resolved(value: object, lookup: Callable[[Reference], object]) -> object:
    """Returns the spec with every reference replaced by `lookup(reference)`.

    A text that consists of a single reference becomes the looked-up value itself, for instance a number. In a longer
    text, the looked-up value is inserted as text.
    """
    if isinstance(value, str):
        found = list(references_in(value))
        if len(found) == 1 and _REFERENCE.fullmatch(value):
            return lookup(found[0])
        return _REFERENCE.sub(lambda match: str(lookup(Reference(*_split(match[1])))), value)
    if isinstance(value, Mapping):
        return {key: resolved(each, lookup) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(each, lookup) for each in value]
    return value


def with_value(spec: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    """Returns a copy of the spec in which the field at the dotted path `path` has the value `value`. Missing mappings
    on the path are created.
    """
    first, _, rest = path.partition(".")
    if not rest:
        return {**spec, first: value}
    inner = spec.get(first)
    return {**spec, first: with_value(inner if isinstance(inner, Mapping) else {}, rest, value)}


def _split(path: str) -> tuple[str, str]:
    stage, _, name = path.partition(".")
    return stage, name
