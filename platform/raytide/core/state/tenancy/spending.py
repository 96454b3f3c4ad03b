"""The accounts of API keys: their reservations, their spending, and the billed usage.

At any moment, `settled + reserved <= budget` holds for each account and period. A reservation is granted only if the
free part of the budget covers it. A request is billed at most its own reservation plus the free part of the budget.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from raytide.core.money import month_of, to_us
from raytide.core.objects.api_key import LIFE, AskedReservation, KeySpending, RequestUsage, billed_micro_usd
from raytide.core.state import tables as t
from raytide.core.state.database import DatabaseAccess
from raytide.core.state.queries.jobs import chunked
from raytide.core.state.tenancy.audit import REQUESTS, add_entry, digest_of_rows
from raytide.core.state.write import append, upsert

Refusal = Literal["", "insufficient_quota", "invalid_api_key"]
"""The reason why a reservation is refused; empty if it is granted."""


@dataclass(slots=True)
class _Account:
    """The spending of one account whose row is locked."""

    id: str
    budget: int | None = None
    per: str = "month"
    carried_pico_usd: int = 0
    settled: dict[str, int] = field(default_factory=dict)
    reserved: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def room(self, period: str) -> int:
        """Returns the micro-dollars that are neither spent nor reserved."""
        assert self.budget is not None
        if self.per == LIFE:
            return self.budget - self.settled.get(LIFE, 0) - sum(self.reserved.values())
        return self.budget - self.settled.get(period, 0) - self.reserved[period]

    def settle(self, cost_pico_usd: int, period: str) -> tuple[int, int]:
        """Returns the micro-dollars that are billed, and those that are waived because they exceed the budget."""
        amount, self.carried_pico_usd = billed_micro_usd(self.carried_pico_usd, cost_pico_usd)
        billed = amount if self.budget is None else min(amount, max(0, self.room(period)))
        for each in (period, LIFE):
            self.settled[each] = self.settled.get(each, 0) + billed
        return billed, amount - billed


class SpendingRecords(DatabaseAccess):
    def reserve(
        self, gateway: str, asked: Sequence[AskedReservation], now_s: float, silent_before_s: float | None = None
    ) -> dict[str, Refusal]:
        """Ends the reservations of all gateways that were last seen before `silent_before_s`. Then reserves amounts
        from accounts' budgets, each in full or not at all. Returns the outcome for each request id: "" if the
        reservation is granted, else the reason for the refusal.

        A request that already has a reservation is granted, and nothing more is reserved for it.
        """
        month = month_of(to_us(now_s))
        with self._db.write() as c:
            _touch(c, gateway, now_s)
            if silent_before_s is not None:
                _release_silent(c, silent_before_s)
            keys = _keys(c, {one.key for one in asked})
            accounts = _lock(c, keys.values())
            standing = _reserved(c, [one.id for one in asked])
            answers: dict[str, Refusal] = {}
            granted: dict[str, dict[str, object]] = {}
            for one in asked:
                key = keys.get(one.key)
                if one.id in standing or one.id in granted:
                    answers[one.id] = ""
                    continue
                if key is None or key.revoked_at_s is not None:
                    answers[one.id] = "invalid_api_key"
                    continue
                account = accounts[key.account]
                if account.budget is not None and one.amount_micro_usd > account.room(month):
                    answers[one.id] = "insufficient_quota"
                    continue
                account.reserved[month] += one.amount_micro_usd
                granted[one.id] = {
                    "id": one.id,
                    "account": account.id,
                    "period": month,
                    "amount_micro_usd": one.amount_micro_usd,
                    "gateway": gateway,
                }
                answers[one.id] = ""
            append(c, t.reservations, list(granted.values()))
            return answers

    def settle(
        self,
        gateway: str,
        requests: Sequence[RequestUsage],
        now_s: float,
        *,
        released: Sequence[str] = (),
        refused: int = 0,
    ) -> int:
        """Bills requests and ends their reservations. Also ends the reservations in `released`. Returns the number of
        newly billed requests.

        A request that was billed before changes nothing. One audit entry covers all new requests. Refused requests
        are not stored, but the audit entry contains their number, `refused`.
        """
        with self._db.write() as c:
            _touch(c, gateway, now_s)
            _delete_reservations(c, released)
            new = {one.id: one for one in requests}
            keys = _keys(c, {one.key for one in requests})
            accounts = _lock(c, keys.values(), others={one.key for one in requests} - keys.keys())
            for part in chunked(list(new)):
                for id in c.execute(sa.select(t.usage.c.id).where(t.usage.c.id.in_(part))).scalars().all():
                    del new[id]
            own = _reserved(c, list(new))
            rows = []
            for one in new.values():
                account = accounts[keys[one.key].account if one.key in keys else one.key]
                period = month_of(to_us(one.at_s))
                if (reservation := own.get(one.id)) is not None:
                    period = reservation.period
                    account.reserved[period] -= reservation.amount_micro_usd
                billed, waived = account.settle(one.cost_pico_usd, period)
                values = one.model_dump(exclude={"cost_pico_usd"})
                rows.append({**values, "cost_micro_usd": billed, "waived_micro_usd": waived})
            append(c, t.usage, rows)
            upsert(c, t.spending, [row for account in accounts.values() for row in _spending_rows(account)])
            _delete_reservations(c, list(own))
            if rows or refused:
                listed = [[row["id"], row["at_s"], row["key"], row["model"], row["status"]] for row in rows]
                detail = {"requests": listed, "rows": digest_of_rows(rows), "refused": refused}
                add_entry(c, now_s, gateway, REQUESTS, "requests", detail)
            return len(rows)

    def seen(self, gateway: str, now_s: float) -> None:
        """Records that a gateway is alive, so that its reservations are kept."""
        with self._db.write() as c:
            _touch(c, gateway, now_s)

    def spent(self, accounts: Iterable[str], now_s: float) -> dict[str, KeySpending]:
        """Returns the spending of these accounts. Accounts that never spent or reserved anything are left out."""
        s, r, month = t.spending.c, t.reservations.c, month_of(to_us(now_s))
        found: dict[str, dict[str, int]] = defaultdict(dict)
        with self._db.read() as c:
            for part in chunked(sorted(set(accounts))):
                rows = c.execute(t.spending.select().where(s.account.in_(part), s.period.in_((month, LIFE))))
                for row in rows:
                    found[row.account]["life" if row.period == LIFE else "month"] = int(row.settled_micro_usd)
                held = sa.select(r.account, sa.func.sum(r.amount_micro_usd)).where(r.account.in_(part))
                for account, amount in c.execute(held.group_by(r.account)):
                    found[account]["reserved"] = int(amount)
        return {account: KeySpending(**values) for account, values in found.items()}


def _keys(c: sa.Connection, ids: set[str]) -> dict[str, sa.Row[Any]]:
    query = t.keys.select()
    return {row.id: row for part in chunked(sorted(ids)) for row in c.execute(query.where(t.keys.c.id.in_(part)))}


def _lock(c: sa.Connection, keys: Iterable[sa.Row[Any]], others: Iterable[str] = ()) -> dict[str, _Account]:
    """Returns the accounts of these keys, locked until the end of the transaction, always in the same order."""
    accounts = {other: _Account(other) for other in others}
    for key in keys:
        accounts[key.account] = _Account(key.account, key.budget_micro_usd, key.budget_per)
    insert = sqlite.insert(t.spending) if c.dialect.name == "sqlite" else postgresql.insert(t.spending)
    for part in chunked(sorted(accounts)):
        first = [{"account": id, "period": LIFE, "settled_micro_usd": 0, "carried_pico_usd": 0} for id in part]
        c.execute(insert.on_conflict_do_nothing(), first)
        of_part = t.spending.c.account.in_(part)
        whole = t.spending.select().where(of_part, t.spending.c.period == LIFE)
        for row in c.execute(whole.order_by(t.spending.c.account).with_for_update()):
            accounts[row.account].carried_pico_usd = row.carried_pico_usd
        for row in c.execute(t.spending.select().where(of_part)):
            accounts[row.account].settled[row.period] = row.settled_micro_usd
        r = t.reservations.c
        sums = sa.select(r.account, r.period, sa.func.sum(r.amount_micro_usd)).where(r.account.in_(part))
        for account, period, amount in c.execute(sums.group_by(r.account, r.period)):
            accounts[account].reserved[period] += int(amount)
    return accounts


def _spending_rows(account: _Account) -> list[dict[str, object]]:
    return [
        {
            "account": account.id,
            "period": period,
            "settled_micro_usd": settled,
            "carried_pico_usd": account.carried_pico_usd if period == LIFE else 0,
        }
        for period, settled in account.settled.items()
    ]


def _reserved(c: sa.Connection, ids: Sequence[str]) -> Mapping[str, sa.Row[Any]]:
    query, id = t.reservations.select(), t.reservations.c.id
    return {row.id: row for part in chunked(ids) for row in c.execute(query.where(id.in_(part)))}


def _delete_reservations(c: sa.Connection, ids: Sequence[str]) -> None:
    for part in chunked(ids):
        c.execute(t.reservations.delete().where(t.reservations.c.id.in_(part)))


def _touch(c: sa.Connection, gateway: str, now_s: float) -> None:
    upsert(c, t.gateways, [{"name": gateway, "seen_at_s": now_s}])


def _release_silent(c: sa.Connection, before_s: float) -> None:
    silent = sa.select(t.gateways.c.name).where(t.gateways.c.seen_at_s < before_s).with_for_update(skip_locked=True)
    names = c.execute(silent).scalars().all()
    for part in chunked(names):
        c.execute(t.reservations.delete().where(t.reservations.c.gateway.in_(part)))
        c.execute(t.gateways.delete().where(t.gateways.c.name.in_(part)))
