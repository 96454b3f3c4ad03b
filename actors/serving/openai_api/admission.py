"""The caller of a request and what it may use: the interface to whoever keeps keys, limits and budgets."""

from __future__ import annotations

from typing import Any, Protocol

from raytide.actors.engine.types import TokenUsage
from raytide.core.objects.api_key import TokenPrice

CALLER = "raytide.caller"
"""The key of the ASGI scope under which a middleware leaves the RequestCaller."""
HEADERS = "raytide.headers"
"""The key of the ASGI scope under which a route leaves headers for the response."""


class Grant(Protocol):
    """An admitted request. It ends once, with `settle` or `release`; later calls do nothing."""

    id: str
    """Names the request in the usage; empty where none is kept."""

    def settle(self, usage: TokenUsage | None, status: int, *, version: str = "") -> None:
        """Bills the tokens so far, with the HTTP status of the response (499 if the client left)."""

    def release(self) -> None:
        """Ends a request that had no response."""

    def headers(self) -> dict[str, str]:
        """Returns headers for the response: limits, and after `settle` the cost."""


class RequestCaller(Protocol):
    """The sender of a request."""

    @property
    def team(self) -> str: ...

    @property
    def account(self) -> str:
        """The account of its key; empty without a key."""

    @property
    def weight(self) -> float:
        """The team's weight in the fair share."""

    @property
    def is_known(self) -> bool:
        """True for the holder of a key."""

    @property
    def priority(self) -> int:
        """The priority of its requests, and the most urgent one that it may ask for; lower is more urgent."""

    @property
    def keeps_answers(self) -> bool:
        """True if its answers may be kept, and kept ones be its answers, where the endpoint does that."""

    def may_use(self, model: str) -> bool: ...

    async def admit(
        self, model: str, prompt_tokens: int, most_completion_tokens: int, *, price: TokenPrice | None = None
    ) -> Grant:
        """Admits a request with the most tokens that it can have, at the endpoint's price unless another one is given.
        Raises ApiError.
        """


class Anybody:
    """The caller where no keys are kept."""

    team = "default"
    account = ""
    weight = 1.0
    keeps_answers = True
    is_known = False
    priority = 0

    def may_use(self, model: str) -> bool:
        return True

    async def admit(
        self, model: str, prompt_tokens: int, most_completion_tokens: int, *, price: TokenPrice | None = None
    ) -> Grant:
        return _Free()


class _Free:
    id = ""

    def settle(self, usage: TokenUsage | None, status: int, *, version: str = "") -> None: ...

    def release(self) -> None: ...

    def headers(self) -> dict[str, str]:
        return {}


def caller_of(scope: Any) -> RequestCaller:
    """Returns the caller that a middleware has found, else anybody."""
    caller: RequestCaller = scope.get(CALLER) or Anybody()
    return caller
