"""An alert rule as data, for Prometheus' rule files and for raytide's own evaluator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from raytide.core.errors import ConfigError
from raytide.core.telemetry.metrics import Layer
from raytide.dashboards.rules.expressions import Condition, Expression, SetOperation

Severity = Literal["critical", "warning", "info"]
"""`critical`: users notice, somebody acts now; `warning`: today; `info`: worth knowing."""

_FIELD = re.compile(r"\{(\w+)(?::(\w+))?\}")
_HUMANIZED = {
    "": 'printf "%.4g"',
    "percent": "humanizePercentage",
    "seconds": "humanizeDuration",
    "bytes": "humanize1024",
}


@dataclass(frozen=True, slots=True)
class AlertRule:
    """An alert rule. An alert fires for each series that the rule's expression yields for `for_s` seconds without a
    break.
    """

    name: str
    severity: Severity
    expr: Expression
    for_s: int
    summary: str
    """A sentence with fields: `{LABEL}`, `{value}`, `{value:percent}`, `{value:seconds}` or `{value:bytes}`."""
    runbook: str
    """A line that says what to look at, or what to do."""
    action: str = ""
    """The action that suits the alert, for users who configure one."""
    layer: Layer = field(kw_only=True)

    def summarize(self, labels: Mapping[str, str], value: float) -> str:
        """Returns the summary of one alert, with its labels and value filled in."""

        def filled(field: re.Match[str]) -> str:
            name, style = field[1], field[2] or ""
            return _FORMATS[style](value) if name == "value" else labels.get(name, "")

        return _FIELD.sub(filled, self.summary)

    def summary_template(self) -> str:
        """Returns the summary in Prometheus' template language."""

        def template(field: re.Match[str]) -> str:
            name, style = field[1], field[2] or ""
            return f"{{{{ $value | {_HUMANIZED[style]} }}}}" if name == "value" else f"{{{{ $labels.{name} }}}}"

        return _FIELD.sub(template, self.summary)

    def adjusted(self, *, bound: float | None = None, for_s: int | None = None) -> AlertRule:
        """Returns the rule with another bound or duration. Raises ConfigError if `bound` is given but the rule has no
        numeric bound.
        """
        expr = self.expr
        if bound is not None:
            if (bounded := _with_bound(expr, bound)) is None:
                raise ConfigError(
                    f"the alert {self.name} has no bound to change.", hint="Change its for_s, or turn it off."
                )
            expr = bounded
        return replace(self, expr=expr, for_s=self.for_s if for_s is None else for_s)


def _with_bound(expr: Expression, bound: float) -> Expression | None:
    """Returns the expression with another number in its first comparison with a number; None if it has no such
    comparison.
    """
    if isinstance(expr, Condition):
        return replace(expr, right=bound) if isinstance(expr.right, int | float) else None
    if isinstance(expr, SetOperation):
        if (left := _with_bound(expr.left, bound)) is not None:
            return replace(expr, left=left)
        if (right := _with_bound(expr.right, bound)) is not None:
            return replace(expr, right=right)
    return None


def _seconds(value: float) -> str:
    if not value >= 60:
        return f"{value:.3g} s"
    return f"{value / 3600:.1f} h" if value >= 3600 else f"{value / 60:.1f} min"


_FORMATS: dict[str, Callable[[float], str]] = {
    "": lambda value: f"{value:.4g}",
    "percent": lambda value: f"{100 * value:.3g}%",
    "seconds": _seconds,
    "bytes": lambda value: f"{value / 2**30:.4g}Gi",
}
