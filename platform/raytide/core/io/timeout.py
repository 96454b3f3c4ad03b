"""A timeout for calls that have no timeout of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from raytide.core.errors import ClusterError, RaytideError, WaitTimeoutError

T = TypeVar("T")


def call_with_timeout(timeout_s: float, what: str, call: Callable[[], T]) -> T:
    """Returns the result of `call`. Raises WaitTimeoutError if the call takes longer than `timeout_s`. A RaytideError
    of the call is raised unchanged, and any other exception as a ClusterError. `what` names the call in these errors.

    The call runs in a thread, which is abandoned on a timeout.
    """
    done: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(call())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise WaitTimeoutError(
            f"waited {timeout_s:g} s for {what}.", hint="`raytide status` shows the cluster's state."
        )
    if not failed:
        return done[0]
    if isinstance(failed[0], RaytideError):
        raise failed[0]
    raise ClusterError(f"while waiting for {what}: {failed[0]}", hint="Ray's logs have details.") from failed[0]
