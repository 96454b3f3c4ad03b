"""One job at a time beside the training: a checkpoint's write, a snapshot's exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundTask:
    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """The last job ended with an error that nobody has been told of yet."""
        return self._error is not None and not self.running

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run `job` once the one before has ended; its error, if it had one, is raised here."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the job has ended, and raise its error once. False when it still runs after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self.running:
            return False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised where it is waited for; DCP's own is no Exception
            self._error = error
