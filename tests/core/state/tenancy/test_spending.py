from __future__ import annotations

import threading
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stores import new_store

from raytide.core.objects.api_key import AskedReservation, KeyBudget, KeySpec, KeySpending, RequestUsage, TokenPrice
from raytide.core.state import Store
from raytide.core.state.tenancy.records import TenancyRecords
from raytide.core.state.tenancy.usage import UsageFilter

NOV, DEC = 1_795_000_000.0, 1_797_000_000.0  # 2026
MICRO = 10**6
"""Pico-dollars of a micro-dollar."""


def asks(id: str, key: str, micro_usd: int) -> AskedReservation:
    return AskedReservation(id=id, key=key, amount_micro_usd=micro_usd)


def key_with(tenancy: TenancyRecords, micro_usd: int | None, per: str = "month") -> str:
    budget = None if micro_usd is None else KeyBudget(usd=micro_usd / 1e6, per=per)  # type: ignore[arg-type]
    return tenancy.keys.create(KeySpec(name="web", team="blue", budget=budget), "ana", uuid.uuid4().hex, 1.0).id


def usage(id: str, key: str, micro_usd: float, at_s: float = NOV, **fields: object) -> RequestUsage:
    cost = round(micro_usd * MICRO)
    return RequestUsage(
        **{"id": id, "at_s": at_s, "key": key, "team": "blue", "cost_pico_usd": cost, "status": 200, **fields}  # type: ignore[arg-type]
    )


def test_a_reservation_that_does_not_fit_is_refused(tenancy: TenancyRecords) -> None:
    key = key_with(tenancy, 100)
    asked = [asks("a", key, 60), asks("b", key, 50), asks("c", key, 40)]
    assert tenancy.spending.reserve("g", asked, NOV) == {"a": "", "b": "insufficient_quota", "c": ""}
    assert tenancy.spending.reserve("g", [asks("a", key, 60)], NOV) == {"a": ""}  # again, and not twice
    assert tenancy.spending.spent([key], NOV) == {key: KeySpending(reserved=100)}
    tenancy.spending.settle("g", [usage("a", key, 10)], NOV, released=["c"])
    assert tenancy.spending.spent([key], NOV) == {key: KeySpending(month=10, life=10)}
    assert tenancy.spending.reserve("g", [asks("d", key, 90), asks("e", key, 1)], NOV) == {
        "d": "",
        "e": "insufficient_quota",
    }


def test_a_monthly_budget_is_renewed_and_one_for_life_is_not(tenancy: TenancyRecords) -> None:
    month, life = key_with(tenancy, 100), key_with(tenancy, 100, "life")
    for key in (month, life):
        tenancy.spending.reserve("g", [asks(f"1{key}", key, 100)], NOV)
        tenancy.spending.settle("g", [usage(f"1{key}", key, 100, at_s=DEC)], DEC)  # it began in November
    assert tenancy.spending.spent([month], DEC) == {month: KeySpending(0, 100)}
    refusals = tenancy.spending.reserve("g", [asks("m", month, 100), asks("l", life, 1)], DEC)
    assert refusals == {"m": "", "l": "insufficient_quota"}


def test_unknown_and_revoked_keys_reserve_nothing(tenancy: TenancyRecords) -> None:
    key = key_with(tenancy, 100)
    tenancy.keys.revoke(key, NOV)
    asked = [asks("a", key, 1), asks("b", "key-99", 1)]
    assert set(tenancy.spending.reserve("g", asked, NOV).values()) == {"invalid_api_key"}


def test_a_request_that_is_reported_twice_is_billed_once(tenancy: TenancyRecords) -> None:
    key = key_with(tenancy, None)
    row = usage("a", key, 7)
    assert tenancy.spending.settle("g", [row, row], NOV) == 1
    assert tenancy.spending.settle("g", [row, usage("b", key, 5)], NOV) == 1
    assert tenancy.spending.settle("other", [row], NOV) == 0
    assert tenancy.spending.spent([key], NOV) == {key: KeySpending(12, 12)}
    assert len(tenancy.audit.entries()) == 2  # of the batches that held something new


def test_costs_below_a_micro_dollar_add_up_to_the_exact_sum(tenancy: TenancyRecords) -> None:
    key = key_with(tenancy, None)
    for number in range(10):
        tenancy.spending.settle("g", [usage(f"{number}", key, 0.3)], NOV)
    assert tenancy.spending.spent([key], NOV)[key].life == 3
    rows, _ = tenancy.usage.rows(UsageFilter())
    assert sorted(row.cost_micro_usd for row in rows) == [0] * 7 + [1] * 3


def test_a_gateway_that_is_silent_loses_its_reservations_and_bills_only_what_is_left(tenancy: TenancyRecords) -> None:
    key = key_with(tenancy, 100)
    tenancy.spending.reserve("dead", [asks("a", key, 80)], NOV)
    tenancy.spending.reserve("alive", [asks("b", key, 20)], NOV + 50)
    tenancy.spending.seen("alive", NOV + 65)
    asked = [asks("c", key, 80)]
    assert tenancy.spending.reserve("new", asked, NOV + 70, silent_before_s=NOV) == {"c": "insufficient_quota"}
    assert tenancy.spending.reserve("new", asked, NOV + 70, silent_before_s=NOV + 10) == {"c": ""}
    tenancy.spending.settle("new", [usage("c", key, 70)], NOV + 71)
    tenancy.spending.settle("dead", [usage("a", key, 80)], NOV + 72)  # it was cut off, not dead
    assert tenancy.spending.spent([key], NOV) == {key: KeySpending(80, 80, 20)}
    rows, _ = tenancy.usage.rows(UsageFilter())
    assert [(row.id, row.cost_micro_usd, row.waived_micro_usd) for row in rows] == [("a", 10, 70), ("c", 70, 0)]


def test_rotated_keys_spend_from_one_budget(tenancy: TenancyRecords) -> None:
    old = key_with(tenancy, 100)
    new = tenancy.keys.rotate(old, "dd", NOV, 60.0).id
    tenancy.spending.reserve("g", [asks("a", old, 70)], NOV)
    assert tenancy.spending.reserve("g", [asks("b", new, 40)], NOV) == {"b": "insufficient_quota"}


def test_usage_is_shown_by_page_and_group(tenancy: TenancyRecords) -> None:
    batch = [
        usage(
            "a", "k", 3, model="chat", version="2", user="ana", prompt_tokens=5, cached_tokens=2, completion_tokens=1
        ),
        usage("b", "k", 4, model="code", version="1", user="bob", status=429),
        usage("c", "", 0, at_s=DEC, model="chat", version="", team="red"),
    ]
    tenancy.spending.settle("g", batch, NOV)
    rows, before = tenancy.usage.rows(UsageFilter(), limit=2)
    assert ([row.id for row in rows], before) == (["c", "b"], 2)
    rows, before = tenancy.usage.rows(UsageFilter(), before=before, limit=2)
    assert ([row.id for row in rows], before) == (["a"], None)
    chat = tenancy.usage.sums(UsageFilter(team="blue", model="chat"), "user")
    assert [(s.group, s.requests, s.errors, s.prompt_tokens, s.cached_tokens, s.cost_micro_usd) for s in chat] == [
        ("ana", 1, 0, 5, 2, 3)
    ]
    assert [(s.group, s.requests, s.errors) for s in tenancy.usage.sums(UsageFilter(), "model")] == [
        ("code", 1, 1),
        ("chat", 2, 0),
    ]
    assert [s.group for s in tenancy.usage.sums(UsageFilter(), "version")] == ["code 1", "chat 2", "chat"]
    assert [s.group for s in tenancy.usage.sums(UsageFilter(), "day")] == ["2026-11-18", "2026-12-11"]
    assert tenancy.usage.sums(UsageFilter(since_s=DEC + 1), "key") == ()


def test_a_price_bounds_the_cost_of_a_request() -> None:
    price = TokenPrice(prompt=2.5, cached=0.25, completion=10)
    assert price.cost_pico_usd(1000, 400, 10) == (600 * 2_500_000 + 400 * 250_000 + 10 * 10_000_000)
    assert price.most_micro_usd(1000, 10) == 2600
    assert TokenPrice(prompt=0.1).most_micro_usd(1, 0) == 1
    assert TokenPrice(cached=1.0).most_micro_usd(5, 0) == 5
    assert TokenPrice().most_micro_usd(10**6, 10**6) == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "settle", "settle", "late", "release", "expire", "rotate"]),
        st.integers(0, 11),
        st.integers(0, 60),
    ),
    max_size=40,
)


def test_no_interleaving_spends_more_than_the_budget(tmp_path: Path) -> None:
    """Requests of two gateways are reserved, settled, released, reported late and again; gateways are given up."""
    budget = 100
    with closing(new_store(tmp_path)) as store:
        tenancy = store.tenancy

        @settings(max_examples=80)
        @given(STEPS)
        def run(steps: list[tuple[str, int, int]]) -> None:
            keys = [key_with(tenancy, budget)]
            account = keys[0]
            prefix, billed = f"{account}/", 0
            for what, number, amount in steps:
                id, gateway, key = f"{prefix}{number}", f"g{number % 2}", keys[number % len(keys)]
                if what == "reserve":
                    tenancy.spending.reserve(gateway, [asks(id, key, amount)], NOV)
                elif what in ("settle", "late"):
                    tenancy.spending.settle(gateway, [usage(id, key, amount + 0.4)], NOV)
                elif what == "release":
                    tenancy.spending.settle(gateway, [], NOV, released=[id])
                elif what == "expire":
                    tenancy.spending.reserve("other", [], NOV, silent_before_s=NOV + 1)
                elif len(keys) < 3:
                    keys.append(tenancy.keys.rotate(keys[-1], uuid.uuid4().hex, 2.0, 99.0).id)
                spent = tenancy.spending.spent([account], NOV).get(account, KeySpending())
                assert spent.month + spent.reserved <= budget
                billed = max(billed, spent.month)
                assert spent.month == billed  # never less than before
            sums = [tenancy.usage.sums(UsageFilter(key=key), "key") for key in keys]
            assert sum(each.cost_micro_usd for part in sums for each in part) == billed

        run()


def test_two_hundred_requests_at_once_stay_within_the_budget(store: Store, url: str) -> None:
    """Half of them crash; each of the others costs all it reserved. Two processes' stores take part."""
    budget, cost, requests = 1000, 30, 200
    key = key_with(store.tenancy, budget)
    granted: list[str] = []
    failures: list[BaseException] = []
    with closing(Store.open(url)) as second:
        todo = iter(range(requests))
        lock = threading.Lock()

        def worker(records: TenancyRecords, gateway: str) -> None:
            try:
                while True:
                    with lock:
                        if (number := next(todo, None)) is None:
                            return
                    id = f"r{number}"
                    if records.spending.reserve(gateway, [asks(id, key, cost)], NOV)[id]:
                        continue
                    with lock:
                        granted.append(id)
                    if number % 2:
                        records.spending.settle(gateway, [usage(id, key, cost)], NOV)
                    elif number % 4:
                        records.spending.settle(gateway, [], NOV, released=[id])
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=worker, args=((store, second)[n % 2].tenancy, f"g{n % 2}")) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    spent = store.tenancy.spending.spent([key], NOV)[key]
    crashed = sum(int(id[1:]) % 4 == 0 for id in granted)
    assert spent.month == cost * sum(int(id[1:]) % 2 for id in granted)
    assert spent.reserved == cost * crashed
    left = budget - spent.month - spent.reserved
    assert left >= 0  # a cost or more where the last requests were refused just before others gave theirs back
    more = [asks(f"r{requests + number}", key, cost) for number in range(left // cost + 1)]
    refused = [bool(store.tenancy.spending.reserve("g0", [each], NOV)[each.id]) for each in more]
    assert refused == [False] * (left // cost) + [True]
    assert store.tenancy.audit.verify().is_whole


@pytest.mark.parametrize("micro_usd", [0, 1])
def test_a_budget_of_nothing_admits_nothing(tenancy: TenancyRecords, micro_usd: int) -> None:
    key = key_with(tenancy, 0)
    answer = tenancy.spending.reserve("g", [asks("a", key, micro_usd)], NOV)
    assert answer == {"a": "insufficient_quota" if micro_usd else ""}
