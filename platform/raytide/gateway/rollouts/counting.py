"""Counts the outcomes of each revision's requests during a rollout, and reports the counts to the control API.

Reports contain totals, so repeating a report changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from raytide.actors.serving.metrics import Outcome, RequestTracker, ServingMetrics
from raytide.core.errors import RaytideError
from raytide.core.specs.rollout import CountedRevision, RolloutReport
from raytide.gateway.tenancy.control_api import ControlApi

PERIOD_S = 0.5
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RevisionTally:
    """The request totals of one revision in one rollout since this gateway started. `CountedRevision` explains the
    fields.
    """

    rollout: int
    revision: int
    requests: int = 0
    errors: int = 0
    started: int = 0
    late: int = 0
    first_token_ms: int = 0
    compared: int = 0
    equal: int = 0

    def fail(self) -> None:
        """Counts a request that the revision could not answer."""
        self.requests += 1
        self.errors += 1

    def to_report(self) -> CountedRevision:
        return CountedRevision(**asdict(self))


class CountedMetrics(ServingMetrics):
    """The metrics of one revision's server. If `tally` is set, the revision's requests are also counted in `tally`."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.tally: RevisionTally | None = None

    def track(self, api: str) -> RequestTracker:
        if self.tally is None:
            return super().track(api)
        return _CountedTracker(self, api, self.tally, self.slo_ttft_s)


class _CountedTracker(RequestTracker):
    def __init__(self, metrics: ServingMetrics, api: str, tally: RevisionTally, goal_s: float | None) -> None:
        super().__init__(metrics, api)
        self._tally, self._goal_s = tally, goal_s
        self._start_s = time.perf_counter()
        self._is_started = self._is_over = False
        loop = asyncio.get_running_loop()
        self._timer = None if goal_s is None else loop.call_later(goal_s, self._count_start, True)

    def tokens(self, choice: int, count: int) -> None:
        if count and not self._is_started:
            waited_s = time.perf_counter() - self._start_s
            self._tally.first_token_ms += round(1000 * waited_s)
            self._count_start(self._goal_s is not None and waited_s > self._goal_s)
        super().tokens(choice, count)

    def finish(self, outcome: Outcome, code: str = "") -> None:
        if not self._is_over:
            self._is_over = True
            if self._timer is not None:
                self._timer.cancel()
            if outcome in (
                "ok",
                "aborted",
                "error",
            ):  # the others are refusals, which are the client's fault or nobody's
                self._tally.requests += 1
                self._tally.errors += outcome == "error"
        super().finish(outcome, code)

    def _count_start(self, is_late: bool) -> None:
        """Counts the first token, and whether it is late. A request counts as late as soon as the promised time has
        passed.
        """
        if not self._is_started:
            self._is_started = True
            self._tally.started += 1
            self._tally.late += is_late


class RolloutReporter:
    def __init__(self, api: ControlApi, counted: Callable[[], Sequence[CountedRevision]]) -> None:
        self._api, self._counted = api, counted
        self._reported: Sequence[CountedRevision] = ()

    async def run(self) -> None:
        """Reports the totals periodically until the task is cancelled."""
        problem = ""
        while True:
            try:
                await self.report()
                problem = ""
            except RaytideError as error:
                if problem != (problem := str(error)):
                    _log.warning("cannot report the counts of rollouts, so they wait: %s", problem)
            await asyncio.sleep(PERIOD_S)

    async def report(self) -> None:
        """Reports the totals if they have changed."""
        counted = self._counted()
        if counted and counted != self._reported:
            await self._api.report_rollouts(RolloutReport(gateway=self._api.gateway, counted=tuple(counted)))
        self._reported = counted
