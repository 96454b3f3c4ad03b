"""What lower floors are handed by higher ones, so that they never import them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from raytide.core.objects.gang import Lease


class LeaseClient(Protocol):
    """What the driver of a gang sees of the platform. Every call also keeps a driver-held lease alive."""

    def lease(self, job_id: str) -> Lease:
        """The lease as it is now; LeaseLostError once it is over."""

    def wait_lease(self, job_id: str, *, newer_than: int, timeout_s: float) -> Lease:
        """The lease as soon as its epoch is above `newer_than`, or as it is after `timeout_s`."""

    def report(self, job_id: str, progress: Mapping[str, float | int | str]) -> None:
        """Numbers for `raytide ps` and the SDK: step, steps, loss, tokens_per_s, restarts, ..."""


class GangClient(LeaseClient, Protocol):
    """What the holder of a GANG job can do besides: hand the lease back itself."""

    def release(self, job_id: str, *, error: str = "") -> None:
        """The work is done, or failed with `error`."""
