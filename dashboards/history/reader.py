"""Reads the history: the stored points of series, and curves of values, rates or quantiles in equal steps."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from raytide.core.errors import StorageError, UsageError
from raytide.dashboards.history.points import Labels, Point, Row, bucket_quantile, rates, stepped, without_resets
from raytide.dashboards.history.schema import VERSION, levels, unpack

MOST_STEPS = 2000
_BUSY_S = 2.0
_REACH_S = 300.0
"""The age up to which a value counts as present, as in Prometheus."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A series in the result of a query."""

    labels: Labels
    points: tuple[Point, ...]


class HistoryReader:
    """Reads the file of a history, even while the writer writes to it. Each call opens the file, so any thread may
    call.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def metrics(self) -> tuple[str, ...]:
        with self._opened() as c:
            return () if c is None else tuple(name for (name,) in c.execute("SELECT name FROM metrics ORDER BY name"))

    def range(
        self, metric: str, where: Mapping[str, str], start_s: float, end_s: float, step_s: float = 0.0
    ) -> list[tuple[Labels, list[Point]]]:
        """Returns the points of the series that have these labels, from `start_s` to `end_s`.

        Without `step_s`, the points have the finest resolution that is stored. With `step_s`, they have the coarsest
        stored resolution that is not coarser than `step_s`, and each point is the last value of its step. Counter
        resets are removed, so the values of a counter never fall.
        """
        found, is_counter = self._rows(metric, where, start_s, end_s, step_s)
        if is_counter:
            return [(labels, without_resets(rows)) for labels, rows in found]
        return [(labels, [(at_s, row.last) for at_s, row in rows]) for labels, rows in found]

    def query(
        self,
        metric: str,
        where: Mapping[str, str],
        start_s: float,
        end_s: float,
        step_s: float,
        *,
        is_rate: bool = False,
        quantile: float | None = None,
        by: Collection[str] | None = None,
    ) -> list[Curve]:
        """Returns curves with one point for each step. A step without a value has no point.

        `is_rate` turns counters into rates per second. `quantile` turns a histogram into its quantile in each step.
        `by` sums the series that have equal values of these labels. Raises UsageError for more than `MOST_STEPS` steps
        and for steps of no length, and StorageError if the file cannot be read.
        """
        if not (step_s > 0 and (end_s - start_s) / step_s <= MOST_STEPS):
            raise UsageError(f"a curve has at most {MOST_STEPS} points.", hint="Use a longer step or a shorter time.")
        ends_s = [end_s - step_s * back for back in reversed(range(int((end_s - start_s) / step_s) + 1))]
        reach_s = max(_REACH_S, step_s)
        name = metric + "_bucket" if quantile is not None else metric
        found = self.range(name, where, start_s - step_s - reach_s, end_s, step_s)
        if not found and quantile is None:
            found = self.range(metric + "_total", where, start_s - step_s - reach_s, end_s, step_s)
        if is_rate or quantile is not None:
            curves = [(labels, rates(points, ends_s, step_s, reach_s)) for labels, points in found]
        else:
            curves = [(labels, stepped(points, ends_s, reach_s)) for labels, points in found]
        if quantile is not None:
            return _finite(_quantiles(quantile, curves, by))
        return _finite(curves if by is None else _sums(curves, by))

    def _rows(
        self, metric: str, where: Mapping[str, str], start_s: float, end_s: float, step_s: float
    ) -> tuple[list[tuple[Labels, list[tuple[float, Row]]]], bool]:
        with self._opened() as c:
            if c is None:
                return [], False
            known = c.execute("SELECT id, is_counter FROM metrics WHERE name = ?", (metric,)).fetchone()
            if known is None:
                return [], False
            series: dict[int, Labels] = {}
            for id, text in c.execute("SELECT id, labels FROM series WHERE metric = ?", (known[0],)):
                labels = tuple((key, value) for key, value in json.loads(text))
                if where.items() <= dict(labels).items():
                    series[id] = labels
            found: defaultdict[int, list[tuple[float, Row]]] = defaultdict(list)
            for at_s, level, data in _read(c, known[0], start_s, end_s, step_s):
                for id, row in unpack(data, level):
                    if id in series:
                        found[id].append((at_s, row))
        return sorted((series[id], rows) for id, rows in found.items()), bool(known[1])

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        """Opens a consistent view of the history; None if there is no file, or the writer is about to replace it."""
        uri = f"{self._path.absolute().as_uri()}?mode=ro"
        try:
            connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
        except sqlite3.OperationalError:  # there is no file
            yield None
            return
        with closing(connection) as c:
            try:
                c.execute("BEGIN")
                is_known = c.execute("PRAGMA user_version").fetchone()[0] == VERSION
                yield c if is_known else None
            except sqlite3.DatabaseError as error:
                raise StorageError(
                    f"the history cannot be read: {error}.",
                    hint="The monitor replaces a broken file at its next write.",
                ) from error


def _read(
    c: sqlite3.Connection, metric: int, start_s: float, end_s: float, step_s: float
) -> list[tuple[float, int, bytes]]:
    """Returns (time, level, row) in order of time. The rows are of the coarsest level that is fine enough for the step;
    before its first row coarser levels are used, and after its last row finer ones.
    """
    all_levels = levels(1.0)
    best = max(level.number for level in all_levels if level.step_s <= step_s)
    select = (
        "SELECT at_s, level, data FROM rows WHERE metric = ? AND level = ? AND at_s > ? AND at_s <= ? ORDER BY at_s"
    )

    def rows(level: int, after_s: float, until_s: float) -> list[tuple[float, int, bytes]]:
        return c.execute(select, (metric, level, after_s, until_s)).fetchall()

    first_s = math.nextafter(start_s, -math.inf)
    found = rows(best, first_s, end_s)
    for level in all_levels[best + 1 :]:
        found = rows(level.number, first_s, math.nextafter(found[0][0], -math.inf) if found else end_s) + found
    for level in reversed(all_levels[:best]):
        found += rows(level.number, found[-1][0] if found else first_s, end_s)
    return found


def _sums(curves: Sequence[tuple[Labels, list[Point]]], by: Collection[str]) -> list[tuple[Labels, list[Point]]]:
    groups: defaultdict[Labels, dict[float, float]] = defaultdict(dict)
    for labels, points in curves:
        group = groups[tuple(pair for pair in labels if pair[0] in by)]
        for at_s, value in points:
            group[at_s] = group.get(at_s, 0.0) + value
    return [(labels, sorted(points.items())) for labels, points in sorted(groups.items())]


def _quantiles(
    q: float, curves: Sequence[tuple[Labels, list[Point]]], by: Collection[str] | None
) -> list[tuple[Labels, list[Point]]]:
    groups: defaultdict[Labels, defaultdict[float, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for labels, points in curves:
        try:
            bound = float(dict(labels)["le"])
        except (KeyError, ValueError):
            continue
        kept = tuple(pair for pair in labels if pair[0] != "le" and (by is None or pair[0] in by))
        for at_s, value in points:
            buckets = groups[kept][at_s]
            buckets[bound] = buckets.get(bound, 0.0) + value
    return [
        (labels, [(at_s, bucket_quantile(q, buckets)) for at_s, buckets in sorted(steps.items())])
        for labels, steps in sorted(groups.items())
    ]


def _finite(curves: Sequence[tuple[Labels, list[Point]]]) -> list[Curve]:
    kept = ((labels, tuple(point for point in points if math.isfinite(point[1]))) for labels, points in curves)
    return [Curve(labels, points) for labels, points in kept if points]
