"""API keys of the gateway: the owner of a key, what the key may use, and records of its use."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints

from raytide.core import bounds
from raytide.core.config import Config
from raytide.core.money import micro_usd

UsageBy = Literal["key", "team", "user", "model", "version", "day"]
LIFE = "life"
"""The period of a budget that is never renewed."""
_PREFIX = "rk-"
_PICO = 1_000_000
"""The pico-dollars in a micro-dollar. A token's price is a whole number of pico-dollars."""
MOST_BATCH = 1000
"""The most requests in one report of a gateway."""
MOST_BATCH_BYTES = 1 << 20
_MODEL = Annotated[str, StringConstraints(min_length=1, max_length=100)]


def new_secret() -> str:
    """Returns a new secret key, which a client sends. It has 256 random bits, so its hash needs no salt."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of_secret(secret: str) -> str:
    """Returns the SHA-256 of a secret key, in hex. Only this hash is stored."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class KeyBudget(Config):
    """The budget of a key: the most that its requests may cost in a period. The cost is computed from the token prices
    of the endpoints.
    """

    usd: float = Field(ge=0, le=bounds.MOST_USD)
    per: Literal["month", "life"] = "month"
    """The period: each calendar month (UTC), or the key's whole life."""


class KeySpec(Config):
    """The specification of a new key, as `raytide key create` sends it. It says what the key may use. A limit that is
    left out does not apply.
    """

    name: bounds.Name
    team: bounds.Name = "default"
    models: tuple[_MODEL, ...] = Field(default=(), max_length=bounds.MOST_LABELS)
    """The endpoints that the key may use, including their adapters, and single adapters (`NAME:ADAPTER`). It may use
    all if this is empty.
    """
    expires_in_s: float | None = Field(default=None, gt=0, le=bounds.MOST_DELAY_S)
    requests_per_min: int | None = Field(default=None, ge=1, le=10**9)
    tokens_per_min: int | None = Field(default=None, ge=1, le=10**12)
    """The limit on tokens of prompts and completions together."""
    budget: KeyBudget | None = None
    priority: int = Field(default=0, ge=-100, le=100)
    """The default priority of the key's requests, and the most urgent that they may request; lower is more urgent. A
    priority below 0 needs a token for all teams.
    """
    answer_cache: bool = False
    """True if answers to the key's requests may be stored and given to equal requests of keys of its team that also
    allow this. It applies to endpoints with an `answer_cache`.
    """


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored API key, without its secret."""

    id: str
    name: str
    team: str
    user: str
    account: str
    """The id of the first key of a rotation. Keys of one account share its limits and its budget."""
    models: tuple[str, ...] = ()
    created_at_s: float = 0.0
    expires_at_s: float | None = None
    revoked_at_s: float | None = None
    replaced_by: str = ""
    """The key that replaced it at a rotation."""
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    budget_micro_usd: int | None = None
    budget_per: Literal["month", "life"] = "month"
    priority: int = 0
    answer_cache: bool = False

    @classmethod
    def from_spec(cls, id: str, spec: KeySpec, user: str, now_s: float) -> Self:
        budget = spec.budget
        return cls(
            id=id,
            name=spec.name,
            team=spec.team,
            user=user,
            account=id,
            models=spec.models,
            created_at_s=now_s,
            expires_at_s=None if spec.expires_in_s is None else now_s + spec.expires_in_s,
            requests_per_min=spec.requests_per_min,
            tokens_per_min=spec.tokens_per_min,
            budget_micro_usd=None if budget is None else micro_usd(budget.usd),
            budget_per="month" if budget is None else budget.per,
            priority=spec.priority,
            answer_cache=spec.answer_cache,
        )

    def is_valid(self, now_s: float) -> bool:
        """Returns whether the key is neither revoked nor expired."""
        return self.revoked_at_s is None and (self.expires_at_s is None or now_s < self.expires_at_s)

    def allows(self, model: str) -> bool:
        """Returns whether the key may use a model. A key for an endpoint may use the endpoint's adapters, too
        (`NAME:ADAPTER`)."""
        return not self.models or model in self.models or model.partition(":")[0] in self.models


@dataclass(frozen=True, slots=True)
class KeySpending:
    """The spending and the reservations of a key's account, in micro-dollars."""

    month: int = 0
    life: int = 0
    reserved: int = 0


class TokenPrice(Config):
    """The prices of an endpoint's tokens, each in US dollars per million tokens."""

    prompt: float = Field(default=0.0, ge=0, le=1e6)
    """The price of prompt tokens that are not in the prefix cache."""
    cached: float = Field(default=0.0, ge=0, le=1e6)
    """The price of prompt tokens that are in the prefix cache."""
    completion: float = Field(default=0.0, ge=0, le=1e6)

    def cost_pico_usd(self, prompt: int, cached: int, completion: int) -> int:
        """Returns the exact cost of a request in pico-dollars. `prompt` counts all prompt tokens, including the
        `cached` ones."""
        uncached = max(0, prompt - cached)
        prices = (micro_usd(self.prompt), micro_usd(self.cached), micro_usd(self.completion))
        return sum(price * tokens for price, tokens in zip(prices, (uncached, cached, completion), strict=True))

    def most_micro_usd(self, prompt: int, completion: int) -> int:
        """Returns the most that a request with these numbers of tokens can cost, in micro-dollars rounded up."""
        pico = max(self.cost_pico_usd(prompt, 0, completion), self.cost_pico_usd(prompt, prompt, completion))
        return -(-pico // _PICO)


class HostedBackend(Config):
    """A model that is served by a hosted API, not by replicas. `metadata.raytide.gateway.hosted` lists these APIs."""

    base_url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@?#]+[^\s@?#]*$", max_length=2048)]
    model: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """The model's name at the hosted API."""
    price: TokenPrice = TokenPrice()
    """The price of its tokens, which API keys pay for its answers."""
    max_tokens: int = Field(default=4096, ge=1, le=10**7)
    """The most tokens of an answer, and the default for a request that sets no limit."""


def billed_micro_usd(carried_pico_usd: int, cost_pico_usd: int) -> tuple[int, int]:
    """Returns the whole micro-dollars to bill for a request, and the rest to carry to the account's next request.

    The billed amounts are differences of the account's rounded cumulative cost, so they sum exactly to it.
    """
    total = carried_pico_usd + cost_pico_usd
    amount = max(0, (total + _PICO // 2) // _PICO)
    return amount, total - amount * _PICO


class RequestUsage(Config):
    """A gateway's report on one request: its tokens, its HTTP status and its cost."""

    id: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,64}$")]
    """The id that the gateway made. A request that is reported again is not billed again."""
    at_s: float = Field(ge=0, le=1e11)
    key: Annotated[str, StringConstraints(max_length=64)] = ""
    """The id of its API key; empty without one."""
    team: bounds.Name
    user: bounds.Word = ""
    model: bounds.Word = ""
    version: bounds.Word = ""
    """The registered version and the revision that answered, such as `chat:2 r7`; an unknown part is left out."""
    prompt_tokens: int = Field(default=0, ge=0, le=10**12)
    cached_tokens: int = Field(default=0, ge=0, le=10**12)
    """The prompt tokens that were in the prefix cache."""
    completion_tokens: int = Field(default=0, ge=0, le=10**12)
    cost_pico_usd: int = Field(default=0, ge=0, le=2**62)
    status: int = Field(ge=100, le=599)
    """The HTTP status; 499 if the client left."""


class AskedReservation(Config):
    """An amount that a gateway asks to reserve, before it admits a request: the most that this request may cost."""

    id: Annotated[str, StringConstraints(pattern=r"^[!-~]{1,64}$")]
    """The id of the request."""
    key: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    amount_micro_usd: int = Field(ge=0, le=2**62)


class ReservationBatch(Config):
    """The reservations that a gateway asks for in one call."""

    most_bytes: ClassVar[int] = MOST_BATCH_BYTES

    gateway: bounds.Name
    asked: tuple[AskedReservation, ...] = Field(default=(), max_length=MOST_BATCH)


class UsageBatch(Config):
    """A gateway's report on finished requests, and on requests that were dropped before they cost anything."""

    most_bytes: ClassVar[int] = MOST_BATCH_BYTES

    gateway: bounds.Name
    requests: tuple[RequestUsage, ...] = Field(default=(), max_length=MOST_BATCH)
    released: tuple[Annotated[str, StringConstraints(max_length=64)], ...] = Field(default=(), max_length=MOST_BATCH)
    """The ids of the reservations of requests that cost nothing."""
    refused: int = Field(default=0, ge=0, le=10**12)
    """The number of further refused requests: without a valid key, or too many at once to report each."""


@dataclass(frozen=True, slots=True)
class KeyTableChange:
    """A change of the API keys, prices and weights that a gateway needs. It contains all prices and weights. If
    `is_whole` is true, it also contains all keys. Otherwise it contains only the keys that changed since the gateway's
    last revision.
    """

    revision: int
    is_whole: bool
    """True if `keys` replaces all keys that the gateway knows."""
    keys: Mapping[str, ApiKey]
    """The keys by the SHA-256 of their secret."""
    prices: Mapping[str, TokenPrice]
    """The prices of all endpoints, by name."""
    weights: Mapping[str, float]
    """The weights of all teams in the fair share."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The stored usage of one billed request."""

    id: str
    at_s: float
    key: str
    team: str
    user: str
    model: str
    version: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_micro_usd: int
    """The billed part of its cost."""
    waived_micro_usd: int
    """The part of its cost that was not billed because it would have exceeded the budget."""
    status: int


@dataclass(frozen=True, slots=True)
class UsageSum:
    """The usage of all requests of one group."""

    group: str
    requests: int
    errors: int
    """Requests with a status of 400 and more."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_micro_usd: int


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An entry of the audit log. Its `hash` covers all its other fields. One of them, `previous`, is the hash of the
    entry before, so `hash` covers all earlier entries as well."""

    seq: int
    at_s: float
    actor: str
    action: str
    object: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    previous: str = ""
    hash: str = ""


@dataclass(frozen=True, slots=True)
class ChainVerdict:
    """The result of a check of the audit log."""

    entries: int
    first_seq: int
    head_seq: int
    head_hash: str
    """The hash of the last entry. If it is stored elsewhere, it can later prove that no entry up to this one was
    rewritten.
    """
    broken_seq: int | None = None
    """The number of the first entry that is wrong or missing; None if there is none."""
    problem: str = ""
    requests: int = 0
    """The number of usage rows that were compared with the entries of their batches."""

    @property
    def is_whole(self) -> bool:
        return self.broken_seq is None
