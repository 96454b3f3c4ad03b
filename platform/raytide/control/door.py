"""Whether the API can be reached at all: while it cannot, the silence of drivers says nothing about them."""

from __future__ import annotations

import httpx

from raytide.core.clock import Clock

_TIMEOUT_S = 1.0
"""The controller's loop waits for it."""


class Door:
    """The API as drivers see it, looked at from time to time."""

    def __init__(self, api_url: str, clock: Clock) -> None:
        self._http = httpx.Client(base_url=api_url, timeout=_TIMEOUT_S)
        self._clock = clock
        self._open_since_s: float | None = None

    def open_since_s(self) -> float:
        """Since when every look has found it answering; raises when this one does not."""
        try:
            self._http.get("/health").raise_for_status()
        except httpx.HTTPError:
            self._open_since_s = None
            raise
        if self._open_since_s is None:
            self._open_since_s = self._clock.now_s()
        return self._open_since_s
