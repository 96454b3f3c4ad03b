"""Evaluates the alert rules over the history, runs the actions of alerts and sends messages about them.

If the cluster runs a real Alertmanager, that program sends its alerts to the API. raytide's evaluator then only records
alerts, so that no action is run twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raytide.core.errors import RaytideError
from raytide.core.logs import logger
from raytide.dashboards.alerts.notify.dispatch import Dispatcher
from raytide.dashboards.alerts.records import AlertRecords, acting_source
from raytide.dashboards.alerts.runner import ActionRunner
from raytide.dashboards.alerts.states import Alert, AlertState, Observed, advance
from raytide.dashboards.history.points import Labels
from raytide.dashboards.history.reader import HistoryReader
from raytide.dashboards.rules.alert_rule import AlertRule
from raytide.dashboards.rules.evaluation import Point as Sample
from raytide.dashboards.rules.evaluation import evaluate, matches
from raytide.dashboards.rules.expressions import Matcher

log = logger(__name__)

_TEST_S = 60.0
"""The time for which a test alert fires."""
_PRUNE_S = 3600.0
_STALE_SCRAPES, _LEAST_STALE_S = 2.5, 15.0
"""The series of a page end once the page was missed for that many scrape intervals, and for at least that many seconds.
"""
_STEPS_S = {3 * 3600.0: 0.0, 36 * 3600.0: 60.0, math.inf: 600.0}
"""The step in which windows up to each length are read from the history, in seconds. The history keeps whole windows in
these steps, so an average weights each part of a window by its length.
"""


class Alerting:
    """Evaluates and handles the alerts of one cluster. Its methods block and must all be called from one thread."""

    def __init__(
        self,
        run_dir: Path,
        rules: Iterable[AlertRule],
        records: AlertRecords,
        runner: ActionRunner,
        dispatcher: Dispatcher,
        history: HistoryReader,
        scrape_s: float,
    ) -> None:
        self._run_dir, self._rules, self._records = run_dir, list(rules), records
        self._runner, self._dispatcher, self._history = runner, dispatcher, history
        self._stale_s, self._pruned_s = max(_LEAST_STALE_S, _STALE_SCRAPES * scrape_s), 0.0
        self.firing: Counter[tuple[str, str]] = Counter()
        """The alerts that fire now, by name and severity."""

    def resume(self, now_s: float) -> None:
        """Continues the actions that an earlier process left unfinished, or records them as interrupted."""
        self._guarded("interrupted actions", lambda: self._runner.resume(now_s))

    def evaluate(self, now_s: float) -> None:
        """Evaluates all rules. If the evaluation of a rule fails, the alerts of this rule stay as they are."""
        try:
            source = StoredSeries(self._history, self._stale_s)
            stored = self._records.alerts()
        except RaytideError as error:
            log.warning("the rules cannot be evaluated", extra={"error": str(error)})
            return
        known = {alert.id: alert for alert in stored if alert.source == "raytide"}
        changed: list[Alert] = []
        for rule in self._rules:
            try:
                found = evaluate(rule.expr, source, now_s)
                changed += _changes(rule, found, known, now_s)
            except (RaytideError, ArithmeticError, ValueError, KeyError) as error:
                log.warning("a rule cannot be evaluated", extra={"alert": rule.name, "error": repr(error)})
        ended = [replace(alert, state=AlertState.RESOLVED, since_s=now_s) for alert in self._over(stored, now_s)]
        if changed or ended:
            self._guarded("alerts", lambda: self._records.save([*changed, *ended], now_s))
        if now_s - self._pruned_s >= _PRUNE_S:
            self._pruned_s = now_s
            self._guarded("old alerts", lambda: self._records.prune(now_s))

    def act(self, now_s: float) -> None:
        """Runs the actions that are due, and sends the messages that are due."""
        source = acting_source(self._run_dir)
        self._guarded("actions", lambda: self._runner.run_due(source, now_s))
        self._guarded("messages", lambda: self._dispatcher.send_due(source, now_s))
        self._guarded("alerts", lambda: self._count(self._records.alerts(source)))

    def _over(self, stored: Iterable[Alert], now_s: float) -> list[Alert]:
        """Returns the alerts of rules that no longer exist, and the test alerts that have lasted long enough."""
        names = {rule.name for rule in self._rules}
        live = [alert for alert in stored if alert.state is not AlertState.RESOLVED]
        tests = [alert for alert in live if alert.is_test and now_s - alert.since_s >= _TEST_S]
        own = [alert for alert in live if alert.source == "raytide" and not alert.is_test]
        return [*tests, *(alert for alert in own if alert.name not in names)]

    def _count(self, alerts: Iterable[Alert]) -> None:
        self.firing = Counter((alert.name, alert.severity) for alert in alerts if alert.state is AlertState.FIRING)

    def _guarded(self, what: str, work: Callable[[], object]) -> None:
        try:
            work()
        except (RaytideError, OSError) as error:  # a full disk, a locked file: the next pass tries again
            log.warning("alerting failed", extra={"what": what, "error": str(error)})


def _changes(rule: AlertRule, found: Mapping[Labels, float], known: Mapping[str, Alert], now_s: float) -> list[Alert]:
    observed = Observed(rule.name, rule.severity, rule.for_s, found, page=rule.runbook)
    mine = {id: alert for id, alert in known.items() if alert.name == rule.name and not alert.is_test}
    return [_summarized(rule, alert) for alert in advance(mine, [observed], now_s)]


def _summarized(rule: AlertRule, alert: Alert) -> Alert:
    """Returns the alert with its summary. An infinite value, as of a ratio to zero, stays only in the summary, because
    JSON has no such number.
    """
    if alert.value is None:  # it was infinite, and the alert ends now
        return alert
    value = alert.value if math.isfinite(alert.value) else None
    return replace(alert, summary=rule.summarize(dict(alert.labels), alert.value), value=value)


class StoredSeries:
    """The history as the source of series for rule evaluation. It reads each metric and window only once.

    A series without a point in the last `stale_s` seconds has ended: the program behind it is gone or stopped reporting
    it.
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
            step_s = next(step_s for most_s, step_s in _STEPS_S.items() if end_s - start_s <= most_s)
            found = self._history.range(metric, {}, start_s, end_s, step_s)
            self._read[key] = [(labels, self._with_end(points, end_s)) for labels, points in found]
        return [each for each in self._read[key] if matches(dict(each[0]), where)]

    def _with_end(self, points: Sequence[tuple[float, float]], end_s: float) -> list[Sample]:
        last_s = points[-1][0]
        return [*points, (end_s, None)] if last_s < end_s - self._stale_s else list(points)
