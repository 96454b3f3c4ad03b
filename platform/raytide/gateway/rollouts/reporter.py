"""Reports what was counted of the revisions of rollouts. Reports are totals, so none counts twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from raytide.core.errors import RaytideError
from raytide.core.specs.rollout import CountedRevision, RolloutReport
from raytide.gateway.tenancy.control_api import ControlApi

PERIOD_S = 0.5
_log = logging.getLogger(__name__)


class RolloutReporter:
    def __init__(self, api: ControlApi, counted: Callable[[], Sequence[CountedRevision]]) -> None:
        self._api, self._counted = api, counted
        self._reported: Sequence[CountedRevision] = ()

    async def run(self) -> None:
        """Reports until it is cancelled."""
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
