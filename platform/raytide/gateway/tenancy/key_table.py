"""The API keys that a gateway knows, copied from the control API. The copy stays usable for a limited time if the
control API does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping

from raytide.actors.serving.openai_api.errors import RETRY_AFTER_S, ApiError, invalid
from raytide.core.errors import RaytideError
from raytide.core.objects.api_key import ApiKey, KeyTableChange, TokenPrice, digest_of_secret
from raytide.gateway.tenancy.control_api import ControlApi

POLL_S = 10.0
"""The longest time in seconds for which the API holds a poll; it answers at once when a key changes."""
_LOOK_TIMEOUT_S = 5.0
"""The longest wait in seconds for the API to look up an unknown key."""
_LOOKS_APART_S = 0.1
"""The least seconds between two such look-ups, so that wrong keys cause at most ten API calls a second."""
MOST_STALE_S = 3600.0
"""The age of the table in seconds from which no key is accepted, because it could have been revoked long before."""
_FREE = TokenPrice()
_log = logging.getLogger(__name__)


class KeyTable:
    """The API keys (by the hashes of their secrets), the token prices of endpoints, and the fair-share weights of
    teams.
    """

    def __init__(
        self,
        api: ControlApi,
        now_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._now_s, self._monotonic_s = api, now_s, monotonic_s
        self._keys: dict[str, ApiKey] = {}
        self._accounts: dict[str, ApiKey] = {}
        """The newest key of each account."""
        self._prices: Mapping[str, TokenPrice] = {}
        self._weights: Mapping[str, float] = {}
        self._revision = -1
        self._synced_s: float | None = None
        self._looking = asyncio.Lock()
        self._looked_s, self._look_succeeded = float("-inf"), False
        self.synced = asyncio.Event()
        """Set once the table was read."""

    async def follow(self) -> None:
        """Polls the control API for changes of the key table, and applies them. Runs until the task is cancelled."""
        problem = ""
        while True:
            try:
                self.apply(await self._api.key_table(self._revision, POLL_S if self._revision >= 0 else 0.0))
                problem = ""
            except (RaytideError, ValueError) as error:  # ValueError: an API of another release
                if problem != (problem := str(error)):
                    _log.warning("cannot read the API keys, so those read last stay valid: %s", problem)
                await asyncio.sleep(random.uniform(0.1, 0.5))

    def apply(self, change: KeyTableChange) -> None:
        """Applies changes to the table. Changes that are older than the table are ignored, unless they contain the
        whole table.
        """
        if change.is_whole:
            self._keys.clear()
        elif change.revision < self._revision:
            return
        for digest, key in change.keys.items():
            if key.revoked_at_s is None:
                self._keys[digest] = key
            else:
                self._keys.pop(digest, None)
        by_age = sorted(self._keys.values(), key=lambda key: key.created_at_s)
        self._accounts = {key.account: key for key in by_age}
        self._prices, self._weights = change.prices, change.weights
        self._revision, self._synced_s = change.revision, self._monotonic_s()
        self.synced.set()

    async def key(self, secret: str) -> ApiKey:
        """Returns the key with this secret. Raises an ApiError: 401 if no valid key has this secret, and 503 if the
        keys cannot be checked.

        A key that is missing from the table may have just been created, so the control API is asked before the key is
        refused. The look-up uses the secret's hash, so that response times reveal nothing about other secrets.
        """
        if self._is_too_old():
            raise unavailable("API keys cannot be checked at the moment.")
        digest = digest_of_secret(secret)
        key = self._keys.get(digest)
        if key is None:
            if not await self._look():
                raise unavailable("This API key cannot be checked at the moment.")
            key = self._keys.get(digest)
        if key is None or not key.is_valid(self._now_s()):
            raise unauthorized(f"Incorrect API key provided: {_masked(secret)}.")
        return key

    def key_of_account(self, account: str) -> ApiKey:
        """Returns the newest key of an account. Work that continues after its request has ended, such as a batch, is
        checked against this key.

        Raises an ApiError: 401 if the account has no valid key, and 503 if the keys cannot be checked.
        """
        if self._is_too_old():
            raise unavailable("API keys cannot be checked at the moment.")
        key = self._accounts.get(account)
        if key is None or not key.is_valid(self._now_s()):
            raise unauthorized("The API key of this request is no longer valid.")
        return key

    def price(self, model: str) -> TokenPrice:
        """Returns the token prices of the endpoint that serves `model`. `model` is the name of the endpoint or of one
        of its adapters.
        """
        return self._prices.get(model.partition(":")[0], _FREE)

    def weight(self, team: str) -> float:
        """Returns the team's weight in fair sharing."""
        return self._weights.get(team, 1.0)

    def _is_too_old(self) -> bool:
        return self._synced_s is None or self._monotonic_s() - self._synced_s > MOST_STALE_S

    async def _look(self) -> bool:
        """Applies all changes made before this call; returns False if the API does not answer. Concurrent calls share
        one request.
        """
        called_s = time.monotonic()
        async with self._looking:
            if self._looked_s < called_s:
                await asyncio.sleep(max(0.0, self._looked_s + _LOOKS_APART_S - called_s))
                self._looked_s, self._look_succeeded = time.monotonic(), False
                try:
                    async with asyncio.timeout(_LOOK_TIMEOUT_S):
                        self.apply(await self._api.key_changes(self._revision))
                    self._look_succeeded = True
                except (RaytideError, ValueError, TimeoutError):
                    pass
            return self._look_succeeded


def unauthorized(message: str) -> ApiError:
    error = invalid(message, param=None, code="invalid_api_key", status=401)
    error.headers["www-authenticate"] = "Bearer"
    return error


def unavailable(message: str) -> ApiError:
    """Returns an ApiError (503) that asks the client to retry soon."""
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return ApiError(503, message, type="server_error", code="overloaded", headers=headers)


def _masked(secret: str) -> str:
    """Returns the secret with all but its ends hidden, as in OpenAI's error messages."""
    return f"{secret[:5]}***{secret[-4:]}" if len(secret) >= 20 else "***"
