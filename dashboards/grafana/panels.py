"""Grafana dashboards and their panels as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from raytide.core.telemetry.catalogue import METRICS
from raytide.core.telemetry.metrics import Metric
from raytide.dashboards.rules.expressions import (
    Expression,
    Matcher,
    Quantile,
    Rate,
    Selector,
    map_series,
    max_by,
    select,
    sum_by,
    to_promql,
)

Kind = Literal["timeseries", "stat", "heatmap"]
Unit = Literal[
    "short",
    "reqps",
    "s",
    "percentunit",
    "percent",
    "currencyUSD",
    "bytes",
    "Bps",
    "watt",
    "celsius",
    "rotmhz",
    "mbytes",
    "ops",
    "suffix: tok/s",
]
"""Grafana's ids of units."""

VARIABLES = ("endpoint", "job", "node", "team")
"""The labels that a dashboard may be narrowed by."""
_LABELS = {
    f"{metric.exposed_name}{end}": metric.labels
    for metric in METRICS.values()
    for end in ("", *(("_bucket", "_sum", "_count") if metric.type == "histogram" else ()))
}
"""The labels of each series, by its name in queries."""


@dataclass(frozen=True, slots=True)
class Query:
    expression: Expression
    legend: str
    """The curve's name, with labels as `{{endpoint}}`."""
    is_promise: bool = False
    """True for a promised value, such as an SLO, which is drawn as a dashed line."""
    is_rare: bool = False
    """True if the query is zero, and not without a value, before the first event."""

    def promql(self, variables: tuple[str, ...] = VARIABLES) -> str:
        """Returns the query in PromQL. A metric is filtered by each dashboard variable that has the name of one of the
        metric's labels.
        """

        def narrowed(selected: Selector) -> Selector:
            labels = _LABELS.get(selected.metric, ("endpoint",) if selected.metric.startswith("endpoint:") else ())
            chosen = {each.label for each in selected.where}
            more = [Matcher(name, "=~", f"${name}") for name in variables if name in labels and name not in chosen]
            return replace(selected, where=(*selected.where, *more))

        query = to_promql(map_series(self.expression, narrowed), window="$__rate_interval")
        return f"{query} or on() vector(0)" if self.is_rare else query


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    bound: float | None = None
    """The value from which the panel is coloured red, usually the bound of its alert."""
    is_stacked: bool = False
    description: str = ""
    empty: str = ""
    """The text that is shown if nothing is measured, for a panel in which zero would be misleading."""


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    variables: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for _, panels in self.rows for panel in panels)


def by_labels(*labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def values(metric: Metric, *by: str, **where: str) -> Query:
    """Returns a query for a gauge, summed by these labels."""
    return Query(sum_by(select(metric, **where), *by), by_labels(*by))


def rates(metric: Metric, *by: str, **where: str | tuple[str, ...]) -> Query:
    """Returns a query for a counter's rate per second, summed by these labels."""
    return Query(sum_by(Rate(select(metric, **where), 300), *by), by_labels(*by))


def events(metric: Metric, *by: str, **where: str) -> Query:
    """Returns a query for the rate of rare events. The rate is zero, not missing, if no event has happened yet."""
    return replace(rates(metric, *by, **where), is_rare=True)


def gauge(metric: Metric, *by: str) -> Query:
    """Returns a query for the largest value of a gauge, by these labels. A sum would count a value twice if two
    processes report it.
    """
    return Query(max_by(select(metric), *by), by_labels(*by))


def row(title: str, *panels: Panel) -> tuple[str, tuple[Panel, ...]]:
    return title, panels


def panel(
    title: str,
    unit: Unit,
    *queries: Query,
    kind: Kind = "timeseries",
    bound: float | None = None,
    description: str = "",
    empty: str = "",
) -> Panel:
    return Panel(title, unit, queries, kind, bound, description=description, empty=empty)


def stacked(title: str, unit: Unit, *queries: Query, description: str = "") -> Panel:
    """Returns a panel whose curves are stacked on each other."""
    return Panel(title, unit, queries, is_stacked=True, description=description)


def stat(title: str, unit: Unit, expression: Expression, *, bound: float | None = None, empty: str = "") -> Panel:
    """Returns a panel with one number. If there is no data, the panel shows the text `empty`. If `empty` is "", it
    shows zero.
    """
    return Panel(title, unit, (Query(expression, "", is_rare=not empty),), "stat", bound, empty=empty)


def quantiles(histogram: Metric, *by: str, q: tuple[float, ...] = (0.5, 0.9, 0.99)) -> tuple[Query, ...]:
    return tuple(
        Query(Quantile(each, select(histogram), 300, by), f"p{round(100 * each)} {by_labels(*by)}".strip())
        for each in q
    )
