"""Authenticates the caller of each request, admits the request, and bills the request when it ends.

caller = await tenancy.authenticate(request.headers)      # before the body is read
grant = await caller.admit(model, prompt_tokens, most_completion_tokens)
try:
    ...                                                   # grant.headers() go into the response
    grant.settle(usage, 200)
finally:
    grant.release()                                       # does nothing after settle
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from raytide.actors.engine.types import TokenUsage
from raytide.actors.serving.openai_api.admission import BatchRow
from raytide.actors.serving.openai_api.errors import ApiError, invalid
from raytide.control.bootstrap.cluster_record import RunningCluster
from raytide.core.errors import ConfigError
from raytide.core.io.atomic_file import read_json
from raytide.core.io.environment import is_loopback
from raytide.core.objects.api_key import ApiKey, RequestUsage, TokenPrice
from raytide.core.objects.cluster_config import load_cluster
from raytide.core.objects.endpoint import ADAPTER_SEPARATOR
from raytide.core.specs.rollout import id_in_group
from raytide.core.telemetry.catalogue.application import RATE_LIMITED, TOKENS
from raytide.core.telemetry.metrics import Sample, ValueRecorder
from raytide.gateway.tenancy.budgets import KeyBudgets
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.key_table import KeyTable, unauthorized, unavailable
from raytide.gateway.tenancy.rate_limits import RateLimits, RateState
from raytide.gateway.tenancy.usage import UsageReporter
from raytide.gateway.tenancy.usage_journal import UsageJournal

_LIMITS_FILE = "gateway_limits.bin"
_LIMITS = {"insufficient_quota": "budget"}
"""The names of limits in metrics, by the type of their error; other limits have the name of the type."""
_TEAM = "default"
"""The team of requests without a key, if keys are not required."""


class Tenancy:
    """The authentication, limits and billing of one gateway process. Use it from one event loop."""

    def __init__(
        self,
        api: ControlApi,
        *,
        requires_keys: bool,
        shared: Path | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """`shared` is the folder in which the gateway processes of this machine keep their rate limits and the requests
        that are not billed yet.
        """
        self.api, self.requires_keys, self._now_s = api, requires_keys, now_s
        self.keys = KeyTable(api, now_s)
        self.limits = RateLimits(None if shared is None else shared / _LIMITS_FILE)
        self.reporter = UsageReporter(api, None if shared is None else UsageJournal(shared, api.gateway))
        self.budgets = KeyBudgets(api, self.reporter)
        self._tokens, self.limited = ValueRecorder(TOKENS), ValueRecorder(RATE_LIMITED)
        self._following: asyncio.Task[None] | None = None

    @classmethod
    def of_cluster(cls, cluster: RunningCluster, name: str) -> Tenancy:
        """Returns the tenancy of the gateway process `name` of a cluster. The token and settings come from the
        cluster's run folder.
        """
        access = read_json(cluster.gateway_file)
        if access is None:
            raise ConfigError(f"{cluster.gateway_file} does not exist.", hint="Run `raytide up` again.")
        gateway = load_cluster(cluster.config_path).settings.gateway
        requires_keys = gateway.demands_keys(is_loopback=is_loopback(urlsplit(cluster.serve_url).hostname or ""))
        api = ControlApi(access["address"], access["token"], f"gateway-{name}-{uuid4().hex[:8]}")
        return cls(api, requires_keys=requires_keys, shared=cluster.run_dir)

    def start(self) -> list[asyncio.Task[None]]:
        """Starts two tasks and returns them: one follows the key table, the other reports usage. Until the table has
        been read, requests with a key get a 503.

        Both tasks run until `close` is called. A task that ends earlier has failed.
        """
        self._following = asyncio.create_task(self.keys.follow())
        return [self._following, self.reporter.start()]

    async def close(self) -> None:
        """Reports the remaining usage and closes the connections. Call it after the last request has ended."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.budgets.close()
        await self.reporter.close()
        await self.api.close()
        self.limits.close()

    async def authenticate(self, headers: Mapping[str, str]) -> GatewayCaller:
        """Returns the caller of a request with these headers, whose names must be in lower case.

        The key is in `Authorization`, or in `x-api-key` as Anthropic's clients send it. Raises an ApiError: 401 if the
        key is missing or invalid, and 503 if the keys cannot be checked. If the cluster does not require keys, only
        texts that look like a raytide key are checked, because OpenAI's client always sends some text.
        """
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        secret = secret or headers.get("x-api-key", "").strip()
        try:
            if secret.startswith("rk-") or (secret and self.requires_keys):
                return GatewayCaller(self, await self.keys.key(secret))
            if self.requires_keys:
                raise unauthorized(
                    "You didn't provide an API key. Send it in an Authorization header: `Authorization: Bearer rk-...`."
                )
        except ApiError:
            self.reporter.report_refused(None)
            raise
        return GatewayCaller(self, None)

    def caller_of_account(self, account: str, row: BatchRow) -> GatewayCaller:
        """Returns the caller of a batch's row. `account` is the account of the API key that created the batch, or "" if
        the batch was created without a key.

        Raises an ApiError with the status 401 if the account no longer has a valid key. The status is also 401 if
        the batch was created without a key and requests need a key now. The status is 503 if the keys cannot be
        checked.
        """
        if account:
            return GatewayCaller(self, self.keys.key_of_account(account), row)
        if self.requires_keys:
            raise unauthorized("This batch was created without an API key, which requests need now.")
        return GatewayCaller(self, None, row)

    def now_s(self) -> float:
        return self._now_s()

    def count_tokens(self, caller: GatewayCaller, model: str, usage: TokenUsage) -> None:
        endpoint, key = model.partition(ADAPTER_SEPARATOR)[0], "" if caller.key is None else caller.key.name
        for kind, count in (
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("generated", usage.completion_tokens),
        ):
            self._tokens.add(endpoint, caller.team, key, kind, amount=count)

    def samples(self) -> Iterator[Sample]:
        """Yields the metrics of tokens and of rate limits for this process's callers."""
        yield from self._tokens.samples()
        yield from self.limited.samples()


class GatewayCaller:
    """The sender of a request: the holder of an API key, or anyone if the cluster does not require keys."""

    def __init__(self, tenancy: Tenancy, key: ApiKey | None, row: BatchRow | None = None) -> None:
        self._tenancy, self.key, self.row = tenancy, key, row
        self.group: int | None = None
        """The group of its user in an A/B test."""

    @property
    def team(self) -> str:
        return _TEAM if self.key is None else self.key.team

    @property
    def account(self) -> str:
        """The account of the caller's key, or an empty text if the caller has no key."""
        return "" if self.key is None else self.key.account

    @property
    def is_known(self) -> bool:
        """True if the caller has a key."""
        return self.key is not None

    @property
    def weight(self) -> float:
        """The weight of the caller's team in fair sharing."""
        return self._tenancy.keys.weight(self.team)

    @property
    def priority(self) -> int:
        """The priority of the caller's requests in the engine. A lower number is more urgent."""
        return 0 if self.key is None else self.key.priority

    @property
    def keeps_answers(self) -> bool:
        """True unless the caller's key turns off the answer cache. The endpoint's own setting must allow the cache as
        well.
        """
        return self.key is None or self.key.answer_cache

    def may_use(self, model: str) -> bool:
        return self.key is None or self.key.allows(model)

    async def admit(
        self, model: str, prompt_tokens: int, most_completion_tokens: int, *, price: TokenPrice | None = None
    ) -> GatewayGrant:
        """Admits a request that uses at most the given numbers of tokens. `price` replaces the endpoint's token prices.

        Raises an ApiError: 403 if the key may not use the model, 429 if the request exceeds a rate limit or the
        budget, 401 if the key has become invalid, and 503 if the limits cannot be checked now. The caller must
        settle or release the returned grant.
        """
        grant = GatewayGrant(self._tenancy, self, model, price or self._tenancy.keys.price(model))
        if self.key is None:
            return grant
        try:
            await self._check(self.key, grant, prompt_tokens, most_completion_tokens)
        except ApiError as error:
            self._tenancy.reporter.report_refused(grant.usage_row(None, error.status))
            if error.status == 429:
                limit = _LIMITS.get(error.body.error.type, error.body.error.type)
                self._tenancy.limited.add(self.team, limit)
            raise
        return grant

    async def _check(self, key: ApiKey, grant: GatewayGrant, prompt_tokens: int, most_completion_tokens: int) -> None:
        tenancy = self._tenancy
        if not key.allows(grant.model):
            text = f"API key {key.name} does not have access to model {grant.model}."
            raise invalid(text, param="model", code="model_not_allowed", status=403)
        if tenancy.reporter.is_full:
            raise unavailable("The gateway cannot bill requests at the moment.")
        grant.counted_tokens, grant.rates = tenancy.limits.take(key, prompt_tokens + most_completion_tokens)
        amount = grant.price.most_micro_usd(prompt_tokens, most_completion_tokens)
        if key.budget_micro_usd is None or amount == 0:
            return
        try:
            await tenancy.budgets.reserve(grant.reservation, key, amount)
            grant.has_reserved = True
        except BaseException:
            tenancy.limits.adjust(key, -grant.counted_tokens)
            raise


class GatewayGrant:
    """The permission for one request to run. It ends with the first call of `settle` or `release`. Later calls do
    nothing.
    """

    def __init__(self, tenancy: Tenancy, caller: GatewayCaller, model: str, price: TokenPrice) -> None:
        self.reservation = uuid4().hex if caller.group is None else id_in_group(uuid4().hex, caller.group)
        """The id of the reservation, of this attempt alone."""
        self.id = self.reservation if caller.row is None else caller.row.id
        """The id under which the answer is billed, once: that of the row, if it is one of a batch."""
        self.caller, self.model, self.price = caller, model, price
        self.counted_tokens, self.rates, self.has_reserved = 0, RateState(), False
        self._tenancy, self._is_over = tenancy, False
        self._cost_pico_usd: int | None = None

    def headers(self) -> dict[str, str]:
        """Returns the response headers of the request: `x-ratelimit-*`, and the cost of the request. The cost is left
        out if it is not settled yet or if the caller has no key.
        """
        if self.caller.key is None or self._cost_pico_usd is None:
            return self.rates.headers()
        return {**self.rates.headers(), "x-raytide-cost-usd": f"{self._cost_pico_usd / 1e12:.9f}"}

    def settle(self, usage: TokenUsage | None, status: int, *, version: str = "") -> None:
        """Bills the tokens that the request has used, and records the HTTP status of its response (499 if the client
        left).

        A batch's row is billed only if it succeeds, because a failed row is requested again.
        """
        if self.caller.row is not None and status != 200:
            usage = None
        if self._end(0 if usage is None else usage.prompt_tokens + usage.completion_tokens):
            if usage is not None:
                self._tenancy.count_tokens(self.caller, self.model, usage)
            row = self.usage_row(usage, status, version)
            self._cost_pico_usd = row.cost_pico_usd
            self._tenancy.reporter.report(row)
            if self.has_reserved and row.id != self.reservation:
                self._tenancy.reporter.release(self.reservation)

    def release(self) -> None:
        """Ends a request that cost nothing and got no response."""
        if self._end(0) and self.has_reserved:
            self._tenancy.reporter.release(self.reservation)

    def usage_row(self, usage: TokenUsage | None, status: int, version: str = "") -> RequestUsage:
        """Returns the report of this request for the control API.

        The report's id is the grant's id if the request was answered (status 200), else the reservation's id.
        """
        key, tokens = self.caller.key, usage or TokenUsage(0, 0)
        cached = min(tokens.cached_tokens, tokens.prompt_tokens)
        return RequestUsage(
            id=self.id if status == 200 else self.reservation,
            at_s=self._tenancy.now_s(),
            key="" if key is None else key.id,
            team=self.caller.team,
            user="" if key is None else key.user,
            model=_word(self.model),
            version=version,
            prompt_tokens=tokens.prompt_tokens,
            cached_tokens=cached,
            completion_tokens=tokens.completion_tokens,
            cost_pico_usd=self.price.cost_pico_usd(tokens.prompt_tokens, cached, tokens.completion_tokens),
            status=status,
        )

    def _end(self, tokens: int) -> bool:
        """Ends the grant, and corrects the rate limit's count to the tokens that were used. Returns False if the grant
        had ended before.
        """
        if self._is_over:
            return False
        self._is_over = True
        if self.caller.key is not None:
            self._tenancy.limits.adjust(self.caller.key, tokens - self.counted_tokens)
        return True


def _word(text: str) -> str:
    """Returns a client's text as one short line that every store accepts."""
    return "".join(char if char.isprintable() else "?" for char in text[:256])
