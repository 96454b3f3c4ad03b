"""Protocols that higher layers implement for lower ones, so that these never import them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from raytide.core.objects.gang import Lease


class LeaseClient(Protocol):
    """The platform as the driver of a gang sees it. Every call also keeps a driver-held lease alive."""

    def lease(self, job_id: str) -> Lease:
        """Returns the present lease; raises LeaseLostError once it is over."""

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        """Returns the lease as soon as its epoch is above `newer_than`, or after `timeout_s` as it is then."""

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        """Numbers for `raytide ps` and the SDK: step, steps, loss, tokens_per_s, restarts, ..."""


class GangClient(LeaseClient, Protocol):
    """A client that can also release the lease, for the holder of a GANG job."""

    def release(self, job_id: str, *, error: str = "") -> None:
        """Releases the lease because the work is done, or has failed with `error`."""
