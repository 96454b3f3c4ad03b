"""Decides when the next tick runs: it retries while the store fails, waits while another controller leads, and rests
longer while nothing happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raytide.control.views import Live, to_json
from raytide.core.clock import Clock
from raytide.core.errors import StorageError
from raytide.core.io.atomic_file import write_json
from raytide.core.logs import logger
from raytide.core.objects.node import NodeState
from raytide.core.objects.plan import Plan
from raytide.core.objects.snapshot import Snapshot
from raytide.core.state import Store

_LAST_DELAY_S = 10.0
_POLL_S = 1.0
_MOST_FAULTS = 5

log = logger(__name__)


class RetryLoop:
    """Runs ticks with back-off.

    `attempt` runs a tick and returns the seconds until the next tick. After a success or a first failure, this delay
    is `period_s`. Each further failure in a row doubles the delay, up to ten seconds.

    A StorageError or OSError is retried without limit, because its cause is expected to be temporary. Any other
    exception is a bug. From the fifth failure in a row on, `attempt` raises such an exception, so that the
    supervisor restarts the process.
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
                log.exception("a tick failed")
                if self._failures >= _MOST_FAULTS:
                    raise
            why = f"no decisions are made until this is fixed: {error}"
            log.error("stalled", extra={"failures": self._failures, "error": str(error)})
            on_failure(why)
            delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, _LAST_DELAY_S)
            return delay_s
        if self._failures:
            log.info("resumed", extra={"failures": self._failures})
        self._failures, self._delay_s = 0, self._period_s
        return self._period_s


def is_idle(snapshot: Snapshot, plan: Plan) -> bool:
    """Returns whether nothing needs to be done until the next event. This holds if there are no jobs, endpoints,
    demands or planned actions, and all nodes are ready."""
    is_wanted = snapshot.jobs or snapshot.leases or snapshot.endpoints or snapshot.demand or plan.actions
    return not is_wanted and all(view.node.state is NodeState.READY for view in snapshot.nodes)


def wait_for_lead(store: Store, holder: str, clock: Clock, live_path: Path) -> None:
    """Returns once this process leads. Until then, it logs and publishes the name of the leading controller."""
    logged = ""
    while other := store.lead(holder):
        if other != logged:
            log.warning("waiting: another controller leads", extra={"holder": other})
            logged = other
        why = f"this controller waits: {other} leads on the same state. Give each cluster a state_url of its own."
        with suppress(OSError):
            write_json(live_path, to_json(Live(at_s=clock.now_s(), errors=(why,))), is_kept=False)
        clock.sleep(_POLL_S)
