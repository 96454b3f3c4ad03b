"""The caller of a request and the caller's rights. This is the interface to the component that keeps keys, limits and
budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from raytide.actors.engine.types import TokenUsage
from raytide.core.objects.api_key import TokenPrice

CALLER = "raytide.caller"
"""The key of the ASGI scope under which a middleware leaves the RequestCaller."""
HEADERS = "raytide.headers"
"""The key of the ASGI scope under which a route leaves headers for the response."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Marks a request that belongs to one row of a batch job.

    `id` is unique among the rows of all batch jobs. If the gateway is killed, the request is sent again with the
    same id. Because of the id, the row is billed only once, and its answer is not computed twice. If
    `may_be_running` is False, no earlier gateway has sent the request.
    """

    id: str
    may_be_running: bool


class Grant(Protocol):
    """The admission of one request. Call either `settle` or `release`, once. Later calls do nothing."""

    id: str
    """The request's id in usage records; empty where no usage is recorded."""

    def settle(self, usage: TokenUsage | None, status: int, *, version: str = "") -> None:
        """Bills the tokens in `usage` and records the response's HTTP status (499 if the client left). Bills nothing if
        `usage` is None.
        """

    def release(self) -> None:
        """Ends the grant of a request that had no response."""

    def headers(self) -> dict[str, str]:
        """Returns headers for the response: the caller's limits and, after `settle`, the request's cost."""


class RequestCaller(Protocol):
    """The sender of a request."""

    @property
    def team(self) -> str: ...

    @property
    def account(self) -> str:
        """The account of the caller's key. Empty if the caller has no key."""

    @property
    def weight(self) -> float:
        """The weight of the caller's team in fair-share scheduling."""

    @property
    def is_known(self) -> bool:
        """True if the caller holds a key."""

    @property
    def priority(self) -> int:
        """The default priority of the caller's requests. It is also the most urgent priority that the caller may ask
        for. Lower numbers are more urgent.
        """

    @property
    def keeps_answers(self) -> bool:
        """True if endpoints with an answer cache may store the caller's answers, and may answer the caller from the
        cache.
        """

    @property
    def row(self) -> BatchRow | None:
        """The batch row for which the caller sends the request. None if the request comes from a client."""

    def may_use(self, model: str) -> bool: ...

    async def admit(
        self, model: str, prompt_tokens: int, most_completion_tokens: int, *, price: TokenPrice | None = None
    ) -> Grant:
        """Admits a request that may generate up to `most_completion_tokens`. The default of `price` is the endpoint's
        price. Raises ApiError if the caller may not use the model or has no budget left.
        """


class Anybody:
    """The caller of every request to a server that has no API keys. It may use all models."""

    team = "default"
    account = ""
    weight = 1.0
    keeps_answers = True
    is_known = False
    priority = 0
    row: BatchRow | None = None

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
    """Returns the caller that a middleware has put into the ASGI scope. Returns an Anybody if there is none."""
    caller: RequestCaller = scope.get(CALLER) or Anybody()
    return caller
