"""API keys, usage and the audit log, without HTTP. Users and gateways call these operations."""

from __future__ import annotations

from collections.abc import Mapping

from raytide.control.api.auth import Caller
from raytide.control.api.services.limits import LimitsService
from raytide.control.api.services.submission_rate import SubmissionRate
from raytide.control.views import KeyView, NewKey, UsagePage
from raytide.core.clock import Clock
from raytide.core.objects.api_key import (
    ApiKey,
    KeySpec,
    KeySpending,
    KeyTableChange,
    ReservationBatch,
    UsageBatch,
    UsageBy,
    UsageSum,
    digest_of_secret,
    new_secret,
)
from raytide.core.state import Store
from raytide.core.state.tenancy.audit import AuditLog
from raytide.core.state.tenancy.spending import Refusal
from raytide.core.state.tenancy.usage import UsageFilter

SILENCE_S = 60.0
"""The time after which a gateway that has not called counts as dead, and its reservations are released."""


class TenancyService:
    """Creates, shows and changes API keys of the caller's team. A caller with a token for all teams can do so for any
    team."""

    def __init__(self, store: Store, clock: Clock, accounts: LimitsService, rate: SubmissionRate) -> None:
        self._store, self._clock, self._accounts, self._rate = store, clock, accounts, rate
        self._records = store.tenancy
        self._since_s = clock.now_s()

    def create_key(self, body: Mapping[str, object], caller: Caller) -> NewKey:
        spec = KeySpec.parse({"team": caller.home, **body}, where="key")
        caller.require_person().require_team(spec.team)
        if spec.priority < 0:  # its requests go before those of other teams
            caller.require_all()
        self._accounts.check_team(spec.team)
        self._rate.take_change(spec.team)
        secret = new_secret()
        key = self._records.keys.create(spec, caller.user, digest_of_secret(secret), self._clock.now_s())
        return NewKey(key, secret)

    def rotate_key(self, key_id: str, caller: Caller, grace_s: float) -> NewKey:
        """Returns a new key that replaces the given one. The old key stays valid for `grace_s` seconds."""
        self._rate.take_change(self._owned(key_id, caller.require_person()).team)
        secret = new_secret()
        now_s = self._clock.now_s()
        return NewKey(self._records.keys.rotate(key_id, digest_of_secret(secret), now_s, grace_s), secret)

    def revoke_key(self, key_id: str, caller: Caller) -> KeyView:
        self._owned(key_id, caller.require_person())
        return self._views((self._records.keys.revoke(key_id, self._clock.now_s()),))[0]

    def key(self, key_id: str, caller: Caller) -> KeyView:
        return self._views((self._owned(key_id, caller),))[0]

    def keys(self, caller: Caller, limit: int, offset: int, *, ended: bool) -> list[KeyView]:
        """Returns keys, newest first. With `ended`, the result includes keys that were revoked or have expired."""
        valid_at_s = None if ended else self._clock.now_s()
        team = caller.only_team
        return self._views(self._records.keys.page(team=team, valid_at_s=valid_at_s, limit=limit, offset=offset))

    def usage(self, which: UsageFilter, before: int | None, limit: int) -> UsagePage:
        return UsagePage(*self._records.usage.rows(which, before=before, limit=limit))

    def usage_sums(self, which: UsageFilter, by: UsageBy) -> tuple[UsageSum, ...]:
        return self._records.usage.sums(which, by)

    def audit(self, caller: Caller) -> AuditLog:
        """Returns the object that reads the audit log. The caller needs a token for all teams, because the log contains
        the changes of all teams.
        """
        caller.require_all()
        return self._records.audit

    def revision(self) -> int:
        return self._records.keys.revision()

    def seen(self, gateway: str) -> None:
        self._records.spending.seen(gateway, self._clock.now_s())

    def key_table(self, since: int) -> KeyTableChange:
        """Returns the keys that changed after the revision `since`, for a gateway. If the store's own revision is
        lower, as after a restore, returns all keys."""
        if since > self.revision():
            since = -1
        revision, keys = self._records.keys.changes(since, self._clock.now_s())
        serving = {each.application: name for name, each in self._store.rollouts.all_serving().items()}
        prices = {
            serving.get(endpoint.name, endpoint.name): endpoint.spec.price for endpoint in self._store.endpoints()
        }
        weights = {name: spec.weight for name, spec in self._accounts.specs().items()}
        return KeyTableChange(revision, since < 0, keys, prices, weights)

    def reserve(self, body: Mapping[str, object]) -> dict[str, Refusal]:
        batch = ReservationBatch.parse(body, where="reservations")
        now_s = self._clock.now_s()
        # While the API was away, no gateway could be seen.
        silent_s = now_s - SILENCE_S if now_s - self._since_s >= SILENCE_S else None
        return self._records.spending.reserve(batch.gateway, batch.asked, now_s, silent_s)

    def settle(self, body: Mapping[str, object]) -> int:
        """Bills the requests that a gateway reports. Returns the number of requests that were not billed before."""
        batch = UsageBatch.parse(body, where="usage")
        return self._records.spending.settle(
            batch.gateway,
            batch.requests,
            self._clock.now_s(),
            released=batch.released,
            refused=batch.refused,
        )

    def _owned(self, key_id: str, caller: Caller) -> ApiKey:
        key = self._records.keys.key(key_id)
        caller.require_team(key.team)
        return key

    def _views(self, keys: tuple[ApiKey, ...]) -> list[KeyView]:
        spent = self._records.spending.spent([key.account for key in keys], self._clock.now_s())
        return [KeyView(key, spent.get(key.account, KeySpending())) for key in keys]
