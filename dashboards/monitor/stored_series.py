"""The history as the rules' evaluator reads it, for one evaluation at a time."""

from __future__ import annotations

from collections.abc import Sequence

from raytide.dashboards.history.points import Labels
from raytide.dashboards.history.reader import HistoryReader
from raytide.dashboards.rules.evaluation import Point as Sample
from raytide.dashboards.rules.evaluation import matches
from raytide.dashboards.rules.expressions import Matcher

_LONG_S, _STEP_S = 2 * 3600.0, 60.0
"""Windows longer than this are read by the minute."""


class StoredSeries:
    """Reads each metric and window once, and none that has no series.

    A series without a point in the last `stale_s` seconds has ended: its page is gone, or does not have it any more.
    """

    def __init__(self, history: HistoryReader, stale_s: float) -> None:
        self._history, self._stale_s = history, stale_s
        self._known = frozenset(history.metrics())
        self._read: dict[tuple[str, float, float], list[tuple[Labels, list[Sample]]]] = {}

    def range(
        self, metric: str, where: Sequence[Matcher], start_s: float, end_s: float
    ) -> list[tuple[Labels, list[Sample]]]:
        if metric not in self._known:
            return []
        key = (metric, start_s, end_s)
        if key not in self._read:
            step_s = _STEP_S if end_s - start_s > _LONG_S else 0.0
            found = self._history.range(metric, {}, start_s, end_s, step_s)
            self._read[key] = [(labels, self._with_end(points, end_s)) for labels, points in found]
        return [each for each in self._read[key] if matches(dict(each[0]), where)]

    def _with_end(self, points: Sequence[tuple[float, float]], end_s: float) -> list[Sample]:
        last_s = points[-1][0]
        return [*points, (end_s, None)] if last_s < end_s - self._stale_s else list(points)
