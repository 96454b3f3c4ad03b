"""Reserves parts of API keys' budgets before requests are admitted.

Reservations that arrive during a call to the control API are sent together in the next call.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from raytide.actors.serving.openai_api.errors import ApiError
from raytide.core.errors import RaytideError
from raytide.core.objects.api_key import MOST_BATCH, ApiKey, AskedReservation, ReservationBatch
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.key_table import unauthorized, unavailable
from raytide.gateway.tenancy.usage import UsageReporter

_PATIENCE_S = 5.0
"""The seconds within which a reservation must be answered; otherwise the request of a key with a budget is refused."""
_RETRY_S = 0.2


class KeyBudgets:
    """Reserves amounts from the budgets of API keys."""

    def __init__(self, api: ControlApi, reporter: UsageReporter) -> None:
        self._api, self._reporter = api, reporter
        self._asked: dict[str, tuple[AskedReservation, asyncio.Future[str]]] = {}
        self._sender: asyncio.Task[None] | None = None

    async def reserve(self, id: str, key: ApiKey, amount_micro_usd: int) -> None:
        """Reserves an amount of the key's budget for the request `id`. Returns when the amount is reserved.

        Raises an ApiError: 429 if the amount exceeds the rest of the budget, 401 if the key is no longer valid, and 503
        if the control API does not answer in time.
        """
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._asked[id] = AskedReservation(id=id, key=key.id, amount_micro_usd=amount_micro_usd), answer
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        try:
            refusal = await answer
        except BaseException:
            if self._asked.pop(id, None) is None and not answer.cancelled():  # it was granted, and nobody wants it
                self._reporter.release(id)
            raise
        if refusal == "insufficient_quota":
            raise _exhausted(key)
        if refusal:
            raise unauthorized("Incorrect API key provided.")

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)

    async def _send(self) -> None:
        while self._asked:
            batch = [self._asked.pop(id) for id in list(self._asked)[:MOST_BATCH]]
            refusals: dict[str, str] = {}
            try:
                with suppress(RaytideError):
                    refusals = await self._answered(tuple(asked for asked, _ in batch))
            finally:
                self._resolve(batch, refusals)

    def _resolve(self, batch: list[tuple[AskedReservation, asyncio.Future[str]]], refusals: dict[str, str]) -> None:
        """Passes the API's answers on. A reservation without an answer, or for which no request waits any more, is
        released, since it may have been granted. It is released only now, because a release that overtakes its
        reservation has no effect.
        """
        for asked, answer in batch:
            refusal = refusals.get(asked.id)
            if answer.done() or refusal is None:
                self._reporter.release(asked.id)
            if answer.done():
                continue
            if refusal is None:
                answer.set_exception(unavailable("The budget of this API key cannot be checked at the moment."))
            else:
                answer.set_result(refusal)

    async def _answered(self, asked: tuple[AskedReservation, ...]) -> dict[str, str]:
        """Returns the API's answers, asking until it responds. Repeating is safe, because each reservation is made
        once.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        batch = ReservationBatch(gateway=self._api.gateway, asked=asked)
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                return await self._api.reserve(batch, timeout_s=max(_RETRY_S, left_s))
            except RaytideError:
                if left_s <= _RETRY_S:
                    raise
            await asyncio.sleep(_RETRY_S)


def _exhausted(key: ApiKey) -> ApiError:
    period = "this month" if key.budget_per == "month" else "in total"
    return ApiError(
        429,
        f"You exceeded your current quota: the budget of API key {key.name} {period} has no room for this request.",
        type="insufficient_quota",
        code="insufficient_quota",
        headers={"x-should-retry": "false"},
    )
