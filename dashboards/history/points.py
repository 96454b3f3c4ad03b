"""Pure functions on the points of a series. They downsample, remove counter resets, and compute rates and quantiles.

A point is `(at_s, value)`. Labels are sorted pairs, so that equal sets of labels compare equal.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Labels = tuple[tuple[str, str], ...]
Point = tuple[float, float]


def label_set(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


@dataclass(frozen=True, slots=True)
class Row:
    """A summary of a series' points within one time step."""

    count: int
    sum: float
    """The sum of the values. For a counter with several points in the step, its increase since the last point before
    the step.
    """
    last: float
    max: float


def downsampled(rows: Sequence[Row], is_counter: bool, before: float | None) -> Row:
    """Returns one row that summarises consecutive rows. `before` is a counter's last value before them, if known."""
    count, last = sum(row.count for row in rows), rows[-1].last
    highest = max(row.max for row in rows)
    if not is_counter:
        return Row(count, sum(row.sum for row in rows), last, highest)
    return Row(count, sum(increase_of(rows, before)), last, highest)


def increase_of(rows: Iterable[Row], before: float | None) -> Iterable[float]:
    """Yields the increase of a counter in each row.

    If a row has several points, the increase is its `sum`, or the difference from the previous value if that is more:
    where the resolution changes, there may be a gap between the rows. If a row has one point, the increase is that
    point's difference from the previous value. A counter that fell has restarted at 0.
    """
    for row in rows:
        if row.count > 1:
            yield row.sum if before is None else max(row.sum, row.last - before)
        elif before is not None:
            yield row.last - before if row.last >= before else row.last
        else:
            yield 0.0
        before = row.last


def without_resets(points: Iterable[tuple[float, Row]]) -> list[Point]:
    """Returns a counter's points without its resets: every value is the first value plus all increases since then."""
    found: list[Point] = []
    total, before = 0.0, None
    for at_s, row in points:
        if before is None:
            total = row.last
        else:
            total += next(iter(increase_of((row,), before)))
        before = row.last
        found.append((at_s, total))
    return found


def increase(points: Sequence[Point]) -> float:
    """Returns the increase of a counter over the points. A counter that fell has restarted at 0."""
    return sum(b - a if b >= a else b for (_, a), (_, b) in pairwise(points))


def rates(points: Sequence[Point], ends_s: Iterable[float], step_s: float, reach_s: float) -> list[Point]:
    """Returns a counter's rate per second over steps of `step_s` seconds. Each step ends at one of `ends_s`.

    The rate of a step also uses the last point before the step, unless that point is more than `reach_s` seconds older
    than the step's start. Steps with fewer than two points are left out.
    """
    times = [at_s for at_s, _ in points]
    found = []
    for end_s in ends_s:
        first, last = bisect_right(times, end_s - step_s), bisect_right(times, end_s)
        if first > 0 and times[first - 1] >= end_s - step_s - reach_s:
            first -= 1
        if last - first >= 2:
            span_s = times[last - 1] - times[first]
            found.append((end_s, increase(points[first:last]) / span_s))
    return found


def stepped(points: Sequence[Point], ends_s: Iterable[float], reach_s: float) -> list[Point]:
    """Returns the latest value at each of the times `ends_s`. Leaves out times at which that value is older than
    `reach_s`.
    """
    times = [at_s for at_s, _ in points]
    found = []
    for end_s in ends_s:
        index = bisect_right(times, end_s) - 1
        if index >= 0 and times[index] > end_s - reach_s:
            found.append((end_s, points[index][1]))
    return found


def bucket_quantile(q: float, buckets: Mapping[float, float]) -> float:
    """Returns a quantile of a histogram as Prometheus' `histogram_quantile` does. `buckets` maps upper bounds to
    cumulative counts.

    Within a bucket the result is interpolated linearly. The lowest bucket begins at zero. A quantile above the highest
    finite bound is returned as that bound. The result is NaN if there are no observations or no bucket up to infinity.
    """
    bounds = sorted(buckets)
    if not bounds or not math.isinf(bounds[-1]) or len(bounds) < 2 or not 0 <= q <= 1:
        return math.nan
    counts: list[float] = []
    for bound in bounds:  # scrapes are not atomic: a bucket may be behind the one before it
        counts.append(max(buckets[bound], counts[-1] if counts else 0.0))
    if counts[-1] <= 0:
        return math.nan
    rank = q * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= rank)
    if index == len(bounds) - 1:
        return bounds[-2]
    if index == 0 and bounds[0] <= 0:
        return bounds[0]
    low, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    within = counts[index] - below
    return low + (bounds[index] - low) * (rank - below) / within if within > 0 else math.nan
