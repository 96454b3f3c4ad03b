"""A gang in user code. The gang is a context manager and holds a lease inside its `with` block. Inside the block, Ray
actors and tasks can run on the lease's members.
"""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType
from typing import Self

from raytide.core.errors import ClusterError, LeaseLostError, RaytideError, WaitTimeoutError
from raytide.core.io.html import framed, table
from raytide.core.logs import logger
from raytide.core.objects.gang import GangClient, Lease, LeaseState, Member

log = logger(__name__)

_POLL_S = 110.0
"""The longest duration of one poll, in seconds. A waiting poll also shows that this process is alive, because it ends
with the process.
"""
_LAST_POLL_S = 3.0
"""The seconds that `__exit__` waits for the running poll, which ends once the release is recorded."""
_AWAY_S = 60.0
"""The seconds for which a release is repeated while the API cannot record it."""


class Gang:
    """A gang with a lease, for user code.

    `with Gang(client, job_id) as gang: Worker.options(**gang.actor_options(0)).remote()`.

    Inside the block, a thread polls for the lease all the time. The lease is therefore kept as long as this process
    lives, and `members` is up to date. The end of the block releases the lease.
    """

    def __init__(self, client: GangClient, job_id: str, *, timeout_s: float = 600.0) -> None:
        self.job_id = job_id
        self._client = client
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._lease: Lease | None = None
        self._lost: RaytideError | None = None
        self._stop = threading.Event()
        self._poller = threading.Thread(target=self._poll, name=f"lease of {job_id}", daemon=True)

    @property
    def lease(self) -> Lease:
        """The lease as last polled. Raises LeaseLostError if the gang does not hold a lease yet, or if the lease has
        ended.
        """
        with self._changed:
            if self._lost is not None:
                raise self._lost
            if self._lease is None:
                raise LeaseLostError(f"the gang of {self.job_id} is not held.", hint="Use it inside its `with` block.")
            return self._lease

    @property
    def members(self) -> tuple[Member, ...]:
        """The members that are usable now. While a member is being replaced, there are fewer members than requested."""
        return self.lease.usable

    def actor_options(self, index: int, **options: object) -> dict[str, object]:
        """Returns the arguments of Ray's `.options(...)` for an actor or task on a member. They set the placement and,
        by default, request all resources of the member. `options` replace or extend them. Raises ClusterError if the
        member is not usable now.
        """
        from raytide.actors.gang.placement_groups import member_options

        lease = self.lease
        member = next((m for m in lease.usable if m.index == index), None)
        if member is None:
            hint = "Its node is being replaced: `wait_change`, then ask again."
            raise ClusterError(f"member {index} of {self.job_id} is not usable now ({lease.reason}).", hint=hint)
        return {**member_options(member, lease.shape), **options}

    def wait_change(self, newer_than: int, *, timeout_s: float) -> Lease:
        """Waits until the lease's epoch differs from `newer_than`, for at most `timeout_s` seconds. The epoch is lower
        if the job has got another lease. Returns the present lease, also after the timeout. Raises LeaseLostError once
        the job has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None or self._epoch != newer_than, timeout_s)
        return self.lease

    def report(self, **progress: float | int | str) -> None:
        """Reports the job's progress, which `raytide ps` shows."""
        self._client.report(self.job_id, progress)

    def _repr_html_(self) -> str:
        lease = self._lease
        members = () if lease is None else lease.members
        rows = [(each.index, each.node_id, each.state) for each in members]
        return framed(table(f"gang of {self.job_id}", ("member", "node", "state"), rows))

    def __enter__(self) -> Self:
        self._poller.start()
        try:
            with self._changed:
                if not self._changed.wait_for(self._is_settled, self._timeout_s):
                    raise WaitTimeoutError(
                        f"{self.job_id} had no gang after {self._timeout_s:g} s.",
                        hint=f"`raytide why {self.job_id}` shows why.",
                    )
                if self._lost is not None:
                    raise self._lost
        except BaseException as error:  # a KeyboardInterrupt too: `__exit__` does not run
            self._release(str(error) or type(error).__name__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release("" if kind is None else f"{kind.__name__}: {error}")

    @property
    def _epoch(self) -> int:
        return -1 if self._lease is None else self._lease.epoch

    def _is_settled(self) -> bool:
        return self._lost is not None or (self._lease is not None and self._lease.state is LeaseState.ACTIVE)

    def _poll(self) -> None:
        while not self._stop.is_set():
            try:
                lease = self._client.wait_lease(self.job_id, newer_than=self._epoch, timeout_s=_POLL_S)
            except (ClusterError, WaitTimeoutError):
                # The API may restart; the lease outlives that. Its end arrives as LeaseLostError.
                self._stop.wait(random.uniform(0.1, 0.5))
            except RaytideError as error:
                self._lose(error)
                return
            except Exception as error:
                self._lose(ClusterError(f"the lease of {self.job_id} cannot be read: {error!r}."))
                return
            else:
                with self._changed:
                    self._lease = lease
                    self._changed.notify_all()

    def _lose(self, error: RaytideError) -> None:
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def _release(self, error: str) -> None:
        """Releases the lease. While the API is away, the release is repeated; an API that stays away raises no error,
        because the results of the block would be lost with it. The lease then ends without polls.
        """
        self._stop.set()
        deadline = time.monotonic() + _AWAY_S
        try:
            while not self._is_released(error, deadline):
                time.sleep(random.uniform(0.1, 0.5))
        finally:
            self._poller.join(_LAST_POLL_S)

    def _is_released(self, error: str, deadline: float) -> bool:
        try:
            self._client.release(self.job_id, error=error)
        except LeaseLostError:
            pass  # it was over already
        except (ClusterError, WaitTimeoutError) as away:
            if time.monotonic() < deadline:
                return False
            log.warning("the lease is not given back", extra={"job": self.job_id, "error": str(away)})
        return True
