"""Whether the API can be reached at all: while it cannot, the silence of drivers says nothing about them."""

from __future__ import annotations

import httpx

_TIMEOUT_S = 1.0
"""The controller's loop waits for it."""


class ApiProbe:
    """The API as drivers see it, looked at from time to time."""

    def __init__(self, api_url: str) -> None:
        self._http = httpx.Client(base_url=api_url, timeout=_TIMEOUT_S)

    def is_open(self) -> bool:
        """True when the API answers; raises when it does not."""
        self._http.get("/health").raise_for_status()
        return True
