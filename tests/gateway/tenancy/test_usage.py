from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.gateway.tenancy.conftest import Line

from raytide.core.objects.api_key import AskedReservation, KeySpec, RequestUsage
from raytide.core.state import Store
from raytide.core.state.tenancy.usage import UsageFilter
from raytide.gateway.tenancy import usage
from raytide.gateway.tenancy.usage import UsageReporter

LIMIT_S = 60.0


def row(id: str, key: str = "") -> RequestUsage:
    return RequestUsage(id=id, at_s=1000.0, key=key, team="default", model="chat", cost_pico_usd=10**6, status=200)


def ids(store: Store) -> list[str]:
    return sorted(each.id for each in store.tenancy.usage.rows(UsageFilter(), limit=10_000)[0])


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    for _ in range(round(limit_s / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


def run(line: Line, body: Callable[[UsageReporter], Awaitable[None]]) -> None:
    async def session() -> None:
        reporter = UsageReporter(line.api())
        reporter.start()
        await body(reporter)
        await reporter.close()

    asyncio.run(session())


def test_requests_are_reported_in_batches_and_the_last_at_shutdown(line: Line, store: Store) -> None:
    async def body(reporter: UsageReporter) -> None:
        for number in range(5):
            reporter.report(row(f"a{number}"))
        await until(lambda: len(ids(store)) == 5)
        assert line.calls.count("/v1/gateway/usage") == 1
        for number in range(2500):  # more than a batch holds
            reporter.report(row(f"b{number}"))

    run(line, body)
    assert len(ids(store)) == 2505


def test_reports_wait_while_the_api_is_away_and_are_billed_once(line: Line, store: Store) -> None:
    async def body(reporter: UsageReporter) -> None:
        line.is_cut = True
        reporter.report(row("a"))
        await asyncio.sleep(0.05)
        line.is_cut, line.answers_lost = False, True
        await until(lambda: line.calls.count("/v1/gateway/usage") >= 2)  # it arrived, and is sent again
        line.answers_lost = False

    run(line, body)
    assert ids(store) == ["a"]
    assert sum(each.cost_micro_usd for each in store.tenancy.usage.sums(UsageFilter(), "key")) == 1


def test_a_shutdown_does_not_wait_for_an_api_that_is_gone(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UsageReporter.close, "__defaults__", (0.2,))

    async def body(reporter: UsageReporter) -> None:
        line.is_cut = True
        reporter.report(row("a"))

    run(line, body)


def test_a_request_that_the_api_rejects_takes_no_other_with_it(line: Line, store: Store) -> None:
    async def body(reporter: UsageReporter) -> None:
        for number in range(5):
            reporter.report(row(f"a{number}"))
        bad = row("bad").model_copy(update={"status": 9999})
        reporter.report(bad)
        reporter.report_refused(None)
        reporter.report(row("z"))
        await until(lambda: len(ids(store)) == 6)

    run(line, body)
    assert ids(store) == ["a0", "a1", "a2", "a3", "a4", "z"]
    counted = [entry.detail["refused"] for entry in store.tenancy.audit.entries()]
    assert sum(counted) == 1


def test_releases_free_reservations(line: Line, store: Store) -> None:
    store.tenancy.keys.create(KeySpec(name="web"), "ana", "d", 1.0)
    asked = [AskedReservation(id="a", key="key-1", amount_micro_usd=5)]
    store.tenancy.spending.reserve("g1", asked, 1000.0)

    async def body(reporter: UsageReporter) -> None:
        reporter.release("a")

    run(line, body)
    assert store.tenancy.spending.spent(["key-1"], 1000.0) == {
        "key-1": store.tenancy.spending.spent(["key-1"], 1.0)["key-1"]
    }
    assert store.tenancy.spending.spent(["key-1"], 1000.0)["key-1"].reserved == 0


def test_the_queue_is_bounded_and_only_requests_without_a_key_are_dropped(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MOST_QUEUED", 10)

    async def body() -> None:
        reporter = UsageReporter(line.api())
        for number in range(20):
            reporter.report(row(f"a{number}"))
        assert len(reporter._requests) == 10
        assert reporter.is_full
        reporter.report(row("k", key="key-1"))
        reporter.report_refused(row("r", key="key-1"))
        assert (len(reporter._requests), reporter._refused) == (11, 1)

    asyncio.run(body())
