"""What keeps a controller from deciding without being its fault: a store that takes nothing, or one on which another
controller decides.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raytide.control.views import Live, to_json
from raytide.core.clock import Clock
from raytide.core.errors import StorageError
from raytide.core.io.atomic_file import write_json
from raytide.core.logs import logger
from raytide.core.state import Store

__all__ = ["RetryLoop", "wait_for_lead"]

_LAST_DELAY_S = 10.0
_ASK_S = 1.0
_MOST_FAULTS = 5

log = logger(__name__)


class RetryLoop:
    """`attempt` runs one pass and returns after how many seconds the next is due: `period_s`, or after failures twice
    as long as the last time, up to ten seconds.

    What room, a server or a lock mends by itself is ridden out for as long as it lasts. Any other fault is one of the
    program: the fifth in a row is raised, so that the supervisor starts it anew.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = self._delay_s = period_s
        self._failures = 0

    def attempt(self, act: Callable[[], object], on_failure: Callable[[str], None]) -> float:
        try:
            act()
        except Exception as error:
            self._failures += 1
            if not isinstance(error, StorageError | OSError):
                log.exception("a pass failed")
                if self._failures >= _MOST_FAULTS:
                    raise
            why = f"nothing is decided until this is mended: {error}"
            log.error("stands still", extra={"failures": self._failures, "error": str(error)})
            on_failure(why)
            delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, _LAST_DELAY_S)
            return delay_s
        if self._failures:
            log.info("goes on", extra={"failures": self._failures})
        self._failures, self._delay_s = 0, self._period_s
        return self._period_s


def wait_for_lead(store: Store, holder: str, clock: Clock, live_path: Path) -> None:
    """Return once no other controller decides on this store; until then say which one does."""
    told = ""
    while other := store.lead(holder):
        if other != told:
            log.warning("waits: another controller decides", extra={"holder": other})
            told = other
        why = f"this controller waits: {other} decides on the same state. Give each cluster a state_url of its own."
        with suppress(OSError):
            write_json(live_path, to_json(Live(at_s=clock.now_s(), errors=(why,))), is_kept=False)
        clock.sleep(_ASK_S)
