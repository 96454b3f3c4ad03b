"""A polling thread, for providers that send no events."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raytide.core.errors import RaytideError
from raytide.core.logs import logger

log = logger(__name__)


class PollWatcher:
    """Calls `look` periodically in a thread of its own. Calls `on_change` from this thread when the result of `look`
    has changed. A poll in which `look` raises an error is skipped.
    """

    def __init__(self, what: str, every_s: float, look: Callable[[], object], on_change: Callable[[], None]) -> None:
        self._every_s, self._look, self._on_change = every_s, look, on_change
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{what}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops polling. Waits at most one period for a poll in progress."""
        self._stop.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        before: object = None
        while not self._stop.wait(self._every_s):
            try:
                now = self._look()
            except RaytideError:
                continue  # the controller's own call reports it
            except Exception as error:  # the thread must see what happens after it
                log.warning("source failed", extra={"source": self._thread.name, "error": repr(error)})
                continue
            if before is not None and now != before:
                self._on_change()
            before = now
