"""Flags values of a signal that are unusual compared with the signal's own history, by robust z-scores.

score = (value - median) / (1.4826 MAD), where 1.4826 MAD estimates the standard deviation of a normal distribution
(Rousseeuw and Croux, 1993). Even if a third of the values are outliers, a new outlier is still found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from raytide.core.errors import RaytideError
from raytide.core.io.atomic_file import write_json
from raytide.core.logs import logger
from raytide.core.telemetry.catalogue import application, cost
from raytide.core.telemetry.catalogue.monitoring import ANOMALY_SCORE
from raytide.core.telemetry.metrics import MetricSample
from raytide.dashboards.alerts.service import ANOMALIES_FILE
from raytide.dashboards.history.reader import HistoryReader

log = logger(__name__)

STEP_S = 600.0
LEAST_VALUES = 24
"""The least number of earlier values (four hours) for a score other than 0."""
_RECENT = 3
"""The number of last values that do not count as earlier values."""
_LEAST_SPREAD = 0.05
"""The least deviation that a score divides by, as a share of the median: a constant signal has no deviation at all."""
_MAD_TO_SIGMA = 1.4826
_FLEET = "the fleet"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """The last value of a signal with its score, and the median and deviation from which the score was computed."""

    signal: str
    """`latency` (median time to first token, in seconds) or `cost` (in dollars an hour)."""
    subject: str
    at_s: float
    value: float
    score: float
    median: float
    mad: float
    """The median absolute deviation from the median."""
    n: int
    """The number of earlier values."""


def robust_score(value: float, earlier: Sequence[float]) -> tuple[float, float, float]:
    """Returns (score, median, MAD). The score is 0 if there are too few earlier values."""
    if len(earlier) < LEAST_VALUES:
        return 0.0, 0.0, 0.0
    middle = median(earlier)
    mad = median(abs(each - middle) for each in earlier)
    spread = max(_MAD_TO_SIGMA * mad, _LEAST_SPREAD * abs(middle))
    return ((value - middle) / spread if spread > 0 else 0.0), middle, mad


class Anomalies:
    """Scores the signals of one cluster every ten minutes."""

    def __init__(
        self, history: HistoryReader, days: float, folder: Path, now_s: Callable[[], float] = time.time
    ) -> None:
        self._history, self._span_s, self._folder, self._now_s = history, days * 86_400.0, folder, now_s
        self._due_s = 0.0
        self.found: tuple[Anomaly, ...] = ()

    def look(self) -> None:
        """Scores all signals if the last scores are old enough. If the history cannot be read, the last scores stay."""
        now_s = self._now_s()
        if 0 <= self._due_s - now_s <= STEP_S:
            return
        self._due_s = now_s + STEP_S
        try:
            self.found = tuple(self._scores(now_s))
            write_json(self._folder / ANOMALIES_FILE, {"signals": [asdict(e) for e in self.found]}, is_kept=False)
        except (RaytideError, OSError) as error:
            log.warning("no anomalies are looked for", extra={"error": str(error)})

    def samples(self) -> Iterator[MetricSample]:
        for each in self.found:
            yield MetricSample(ANOMALY_SCORE, each.score, (each.signal, each.subject))

    def _scores(self, now_s: float) -> Iterator[Anomaly]:
        start_s = now_s - min(self._span_s, 7 * 86_400.0)
        latency = self._history.query(
            application.FIRST_TOKEN_SECONDS.name, {}, start_s, now_s, STEP_S, quantile=0.5, by=("endpoint",)
        )
        spent = self._history.query(cost.NODE_PRICE.name, {}, start_s, now_s, STEP_S, by=())
        curves = [("latency", dict(curve.labels).get("endpoint", ""), curve.points) for curve in latency]
        curves += [("cost", _FLEET, curve.points) for curve in spent]
        for signal, subject, points in curves:
            at_s, value = points[-1]
            if at_s <= now_s - STEP_S:  # it has no value now, so that it cannot be unusual
                continue
            earlier = [each for _, each in points[:-_RECENT]]
            score, middle, mad = robust_score(value, earlier)
            yield Anomaly(signal, subject, at_s, value, score, middle, mad, len(earlier))
