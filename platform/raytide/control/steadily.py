"""Repeats the controller's pass through times in which its store, or the disk below it, takes nothing."""

from __future__ import annotations

from collections.abc import Callable

from raytide.core.errors import StorageError
from raytide.core.logs import logger

__all__ = ["Steadily"]

_LAST_DELAY_S = 10.0

log = logger(__name__)


class Steadily:
    """`attempt` runs one pass and returns after how many seconds the next is due: `period_s`, or after failures twice
    as long as the last time, up to ten seconds.

    Only what room, a server or a lock mends by itself is ridden out: anything else is a fault of the program.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = self._delay_s = period_s
        self._failures = 0

    def attempt(self, act: Callable[[], object], on_failure: Callable[[str], None]) -> float:
        try:
            act()
        except (StorageError, OSError) as error:
            self._failures += 1
            why = f"nothing is decided until this is mended: {error}"
            log.error("stands still", extra={"failures": self._failures, "error": str(error)})
            on_failure(why)
            delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, _LAST_DELAY_S)
            return delay_s
        if self._failures:
            log.info("goes on", extra={"failures": self._failures})
        self._failures, self._delay_s = 0, self._period_s
        return self._period_s
