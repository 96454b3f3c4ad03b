"""A driver's view of its lease. Threads poll the API, so that an API restart does not hold up the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures

from raytide.core.errors import ClusterError, LeaseLostError, RaytideError, WaitTimeoutError
from raytide.core.objects.gang import Lease, LeaseClient, LeaseState, Member, MemberState

POLL_S = 110.0
RETRY_S = 0.5
REPORT_EVERY_S = 1.0


def ready_members(lease: Lease) -> list[Member]:
    """Returns the members on which work can begin now: those that are usable and not about to leave."""
    return [member for member in lease.members if member.state is MemberState.READY]


def settled_members(lease: Lease) -> list[Member]:
    """Returns the ready members if there are enough and no more are about to join. Otherwise returns an empty list."""
    coming = any(member.state in (MemberState.ASSIGNED, MemberState.FORMING) for member in lease.members)
    members = ready_members(lease)
    is_enough = lease.state is LeaseState.ACTIVE and len(members) >= lease.shape.at_least
    return members if is_enough and not coming else []


class LeaseWatch:
    """Polls for the newest lease in a background thread. While the API cannot be reached, the last known lease stays
    valid.
    """

    def __init__(self, client: LeaseClient, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._lease: Lease | None = None
        self._error: RaytideError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lease-watch", daemon=True)
        self._thread.start()

    def latest(self) -> Lease | None:
        """Returns the newest lease, or None before the API's first answer. If polling ended with an error, such as
        LeaseLostError, raises that error.
        """
        if self._error is not None:
            raise self._error
        return self._lease

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set() and self._error is None:
            try:
                if self._lease is None:
                    self._lease = self._client.lease(self._job_id)
                else:
                    self._lease = self._client.wait_lease(self._job_id, newer_than=self._lease.epoch, timeout_s=POLL_S)
            except (ClusterError, WaitTimeoutError):
                self._closed.wait(RETRY_S)
            except RaytideError as error:
                self._error = error
            except Exception as error:
                self._error = ClusterError(f"the lease of {self._job_id} cannot be read: {error!r}.")


class ProgressReporter:
    """Sends progress to the API on a thread, at most once a second. If the value `settled` of the progress has changed,
    it is sent at once. While an earlier report is on its way, `send` drops the progress that it gets. A later call of
    `send` then sends newer progress.
    """

    def __init__(self, client: LeaseClient, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="report")
        self._flight: Future[None] | None = None
        self._next_s = 0.0
        self._settled: object = ""
        self._reported: dict[str, float | int | str] = {}

    def send(self, progress: Mapping[str, float | int | str]) -> None:
        is_due = time.monotonic() >= self._next_s or progress.get("settled") != self._settled
        if is_due and (self._flight is None or self._flight.done()):
            self._next_s = time.monotonic() + REPORT_EVERY_S
            self._settled = progress.get("settled")
            self._flight = self._pool.submit(self._report, dict(progress))

    def close(self, progress: Mapping[str, float | int | str], timeout_s: float = 5.0) -> None:
        """Sends what has changed since the last report, and waits briefly until it is sent.

        Values that were already sent are not sent again. In the meantime, the script itself may have reported newer
        values under the same names, and these must not be overwritten.
        """
        wait_futures([self._pool.submit(self._report_changes, dict(progress))], timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _report(self, progress: Mapping[str, float | int | str]) -> None:
        try:
            self._client.report(self._job_id, progress)
        except (ClusterError, WaitTimeoutError, LeaseLostError):
            return  # the next report includes this one; LeaseWatch raises for a lost lease
        self._reported = dict(progress)

    def _report_changes(self, progress: Mapping[str, float | int | str]) -> None:
        reported = self._reported
        changed = {name: value for name, value in progress.items() if name not in reported or reported[name] != value}
        if changed:
            self._report(changed)
