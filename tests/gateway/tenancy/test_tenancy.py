"""The facade over the real API: who is let in, what is refused and how, and what is billed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.gateway.tenancy.conftest import Line
from tests.gateway.tenancy.test_usage import until

from raytide.actors.engine.types import TokenUsage
from raytide.actors.serving.openai_api.admission import BatchRow
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.control.bootstrap.cluster_record import HeadCluster
from raytide.control.bootstrap.control_plane import grant_access
from raytide.core.errors import ConfigError
from raytide.core.objects.api_key import ApiKey, KeySpending, ReservationBatch, TokenPrice, new_secret
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.state import Store
from raytide.core.state.tenancy.usage import UsageFilter
from raytide.gateway.tenancy import usage
from raytide.gateway.tenancy.budgets import KeyBudgets
from raytide.gateway.tenancy.tenancy import GatewayCaller, Tenancy

SecretOf = Callable[..., str]
PRICE = TokenPrice(prompt=1.0, cached=0.1, completion=2.0)
"""A micro-dollar for each prompt token, a tenth of it for a cached one, and two for each of the completion."""


@pytest.fixture(autouse=True)
def endpoint(store: Store) -> None:
    store.save_endpoint(ServeSpec(name="chat", model="/m", price=PRICE), "ana", 1.0)


def run(line: Line, body: Callable[[Tenancy], Awaitable[None]], *, requires_keys: bool = True) -> None:
    async def session() -> None:
        tenancy = Tenancy(line.api(), requires_keys=requires_keys)
        tenancy.start()
        if not line.is_cut:
            await asyncio.wait_for(tenancy.keys.synced.wait(), 60)
        try:
            await body(tenancy)
        finally:
            line.is_cut = line.answers_lost = False
            await tenancy.close()

    asyncio.run(session())


async def caller(tenancy: Tenancy, secret: str) -> GatewayCaller:
    return await tenancy.authenticate({"authorization": f"Bearer {secret}"})


async def refusal(admitted: Awaitable[object]) -> tuple[int, str, str | None]:
    with pytest.raises(ApiError) as error:
        await admitted
    return error.value.status, error.value.body.error.type, error.value.body.error.code


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer  ", "Basic x", f"Bearer rk-{43 * 'x'}", "Bearer sk-x"])
def test_without_a_valid_key_nobody_is_let_in(line: Line, store: Store, header: str) -> None:
    async def body(tenancy: Tenancy) -> None:
        with pytest.raises(ApiError) as error:
            await tenancy.authenticate({"authorization": header})
        assert (error.value.status, error.value.body.error.code) == (401, "invalid_api_key")

    run(line, body)
    assert [entry.detail["refused"] for entry in store.tenancy.audit.entries()] == [1]


def test_where_no_keys_are_demanded_all_are_let_in_but_keys_still_count(
    line: Line, store: Store, secret_of: SecretOf
) -> None:
    secret = secret_of(requests_per_min=1, team="blue")

    async def body(tenancy: Tenancy) -> None:
        for headers in ({}, {"authorization": "Bearer EMPTY"}):
            anybody = await tenancy.authenticate(headers)
            assert (anybody.is_known, anybody.team, anybody.may_use("x")) == (False, "default", True)
            grant = await anybody.admit("chat", 10, 10**9)
            assert grant.headers() == {}
            grant.settle(TokenUsage(10, 5), 200)
        with pytest.raises(ApiError):
            await caller(tenancy, new_secret())
        known = await caller(tenancy, secret)
        assert (known.is_known, known.team) == (True, "blue")
        await known.admit("chat", 1, 1)
        assert await refusal(known.admit("chat", 1, 1)) == (429, "requests", "rate_limit_exceeded")

    run(line, body, requires_keys=False)
    rows, _ = store.tenancy.usage.rows(UsageFilter(key=""))
    assert [(row.team, row.cost_micro_usd) for row in rows] == [("default", 20)] * 2


def test_a_request_is_billed_for_what_it_used(line: Line, store: Store, secret_of: SecretOf) -> None:
    secret = secret_of(tokens_per_min=1000, budget={"usd": 0.001})

    async def body(tenancy: Tenancy) -> None:
        who = await caller(tenancy, secret)
        grant = await who.admit("chat", 100, 300)
        assert grant.headers()["x-ratelimit-remaining-tokens"] == "600"
        assert store.tenancy.spending.spent(["key-1"], tenancy.now_s())["key-1"].reserved == 700
        assert "x-raytide-cost-usd" not in grant.headers()
        grant.settle(TokenUsage(100, 50, 40), 200, version="v3")
        assert grant.headers()["x-raytide-cost-usd"] == "0.000164000"
        grant.settle(TokenUsage(100, 300), 200)  # too late
        grant.release()
        await until(lambda: bool(store.tenancy.usage.rows(UsageFilter())[0]))
        assert store.tenancy.spending.spent(["key-1"], tenancy.now_s())["key-1"] == KeySpending(164, 164, 0)
        again = await who.admit("chat", 836, 0)  # the rest of the budget, and of the tokens
        again.release()

    run(line, body)
    (row,), _ = store.tenancy.usage.rows(UsageFilter())
    assert (row.key, row.user, row.model, row.version, row.status) == ("key-1", "ana", "chat", "v3", 200)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (100, 40, 50)


def test_a_row_of_a_batch_is_billed_once_and_only_for_a_whole_answer(
    line: Line, store: Store, secret_of: SecretOf
) -> None:
    """Its gateway is killed after the answer was billed, and the next one asks for it again."""
    secret_of(budget={"usd": 1.0})

    async def body(tenancy: Tenancy) -> None:
        asked = tenancy.caller_of_account("key-1", BatchRow("batch_1-0-row", may_be_running=True))
        other = tenancy.caller_of_account("key-1", BatchRow("batch_1-1-row", may_be_running=True))
        for status in (499, 500, 200, 200):
            grant = await asked.admit("chat", 100, 50)
            grant.settle(TokenUsage(100, 40), status)
        (await other.admit("chat", 100, 50)).settle(TokenUsage(100, 10), 200)

    run(line, body)
    rows, _ = store.tenancy.usage.rows(UsageFilter(), limit=10)
    assert sorted((row.status, row.completion_tokens, row.cost_micro_usd) for row in rows) == [
        (200, 10, 120),
        (200, 40, 180),
        (499, 0, 0),
        (500, 0, 0),
    ]
    assert store.tenancy.spending.spent(["key-1"], time.time())["key-1"] == KeySpending(300, 300), "none is reserved"


def test_refusals_are_openais_and_are_reported(line: Line, store: Store, secret_of: SecretOf) -> None:
    secret = secret_of(models=["chat"], tokens_per_min=500, budget={"usd": 0.0002, "per": "life"})

    async def body(tenancy: Tenancy) -> None:
        who = await caller(tenancy, secret)
        assert not who.may_use("code")
        assert await refusal(who.admit("code\n", 1, 1)) == (403, "invalid_request_error", "model_not_allowed")
        with pytest.raises(ApiError) as error:
            await who.admit("chat", 100, 51)
        assert (error.value.status, error.value.body.error.code) == (429, "insufficient_quota")
        assert error.value.headers["x-should-retry"] == "false"
        grant = await who.admit("chat", 100, 50)  # its tokens were not taken by the refused one
        grant.settle(TokenUsage(100, 50), 200)
        assert await refusal(who.admit("chat", 400, 0)) == (429, "tokens", "rate_limit_exceeded")

    run(line, body)
    rows, _ = store.tenancy.usage.rows(UsageFilter())
    assert [row.status for row in rows] == [429, 200, 429, 403]
    assert [row.model for row in rows][-1] == "code?"
    assert store.tenancy.audit.verify().is_whole


def test_two_hundred_requests_at_once_share_few_calls_and_stay_within_the_budget(
    line: Line, store: Store, secret_of: SecretOf
) -> None:
    """Some are cancelled while they wait, some are released, some settle for all that they reserved."""
    secret = secret_of(budget={"usd": 0.001})

    async def one(tenancy: Tenancy, number: int) -> int:
        grant = await (await caller(tenancy, secret)).admit("chat", 10, 10)
        await asyncio.sleep(0)
        if number % 3 == 0:
            grant.release()
            return 0
        grant.settle(TokenUsage(10, 10), 200)
        return 30

    async def body(tenancy: Tenancy) -> None:
        tasks = [asyncio.create_task(one(tenancy, number)) for number in range(200)]
        await asyncio.sleep(0)
        for task in tasks[::7]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        spent = sum(result for result in results if isinstance(result, int))
        assert 0 < spent <= 1000
        assert line.calls.count("/v1/gateway/reservations") < 20
        await until(
            lambda: store.tenancy.spending.spent(["key-1"], tenancy.now_s())["key-1"] == KeySpending(spent, spent)
        )

    run(line, body)


def test_without_the_api_only_keys_with_a_budget_are_refused(
    line: Line, secret_of: SecretOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytide.gateway.tenancy.budgets._PATIENCE_S", 0.3)
    plain, limited = secret_of(), secret_of(budget={"usd": 1})

    async def body(tenancy: Tenancy) -> None:
        line.is_cut = True
        (await (await caller(tenancy, plain)).admit("chat", 1, 1)).settle(TokenUsage(1, 1), 200)
        assert await refusal((await caller(tenancy, limited)).admit("chat", 1, 1)) == (
            503,
            "server_error",
            "overloaded",
        )

    run(line, body)


def test_what_costs_nothing_needs_no_reservation(line: Line, store: Store, secret_of: SecretOf) -> None:
    secret = secret_of(budget={"usd": 0})

    async def body(tenancy: Tenancy) -> None:
        (await (await caller(tenancy, secret)).admit("free", 10, 10)).settle(TokenUsage(10, 10), 200)
        (await (await caller(tenancy, secret)).admit("free", 10, 10)).release()
        assert await refusal((await caller(tenancy, secret)).admit("chat", 1, 1)) == (
            429,
            "insufficient_quota",
            "insufficient_quota",
        )

    run(line, body)
    assert line.calls.count("/v1/gateway/reservations") == 1
    assert [row.status for row in store.tenancy.usage.rows(UsageFilter())[0]] == [429, 200]


def test_a_reservation_whose_answer_was_lost_is_made_once(line: Line, store: Store, secret_of: SecretOf) -> None:
    secret = secret_of(budget={"usd": 1})

    async def body(tenancy: Tenancy) -> None:
        line.answers_lost = True
        admitting = asyncio.create_task((await caller(tenancy, secret)).admit("chat", 10, 10))
        await until(lambda: line.calls.count("/v1/gateway/reservations") >= 2)  # the first answer is lost
        line.answers_lost = False
        grant = await admitting
        assert store.tenancy.spending.spent(["key-1"], tenancy.now_s())["key-1"].reserved == 30
        grant.release()

    run(line, body)


def test_nothing_is_admitted_that_could_not_be_billed(
    line: Line, secret_of: SecretOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MOST_QUEUED", 2)
    secret = secret_of()

    async def body(tenancy: Tenancy) -> None:
        line.is_cut = True
        for _ in range(2):
            (await (await caller(tenancy, secret)).admit("chat", 1, 1)).settle(None, 500)
        assert await refusal((await caller(tenancy, secret)).admit("chat", 1, 1)) == (503, "server_error", "overloaded")
        (await tenancy_of_anybody(tenancy).admit("chat", 1, 1)).settle(None, 200)  # dropped

    run(line, body)


def tenancy_of_anybody(tenancy: Tenancy) -> GatewayCaller:
    return GatewayCaller(tenancy, None)


class TestSettings:
    @pytest.fixture
    def cluster(self, tmp_path: Path) -> HeadCluster:
        folder = tmp_path / "run"
        folder.mkdir()
        local = Path("platform/raytide/control/bootstrap/local.yaml")
        (folder / "cluster.yaml").write_text((Path(__file__).parents[3] / local).read_text())
        return HeadCluster(
            name="local",
            cluster_id="x",
            run_dir=folder,
            gcs_address="127.0.0.1:6379",
            dashboard_url="",
            api_url="http://127.0.0.1:1",
            serve_url="http://127.0.0.1:8000",
            state_url="",
            config_path=folder / "cluster.yaml",
            created_at_s=0.0,
            version="",
        )

    def requires_keys(self, cluster: HeadCluster) -> bool:
        async def made() -> bool:
            tenancy = Tenancy.of_cluster(cluster, "1")
            await tenancy.api.close()
            tenancy.limits.close()
            return tenancy.requires_keys

        return asyncio.run(made())

    def test_keys_are_demanded_unless_the_gateway_is_on_loopback(self, cluster: HeadCluster) -> None:
        with pytest.raises(ConfigError, match=r"gateway\.json"):
            self.requires_keys(cluster)
        grant_access(cluster)
        assert not self.requires_keys(cluster)
        assert self.requires_keys(cluster.model_copy(update={"serve_url": "http://10.0.0.1:8000"}))
        text = cluster.config_path.read_text()
        cluster.config_path.write_text(text + "    gateway: {require_keys: true}\n")
        assert self.requires_keys(cluster)
        cluster.config_path.write_text(text + "    gateway: {require_keys: false}\n")
        assert not self.requires_keys(cluster.model_copy(update={"serve_url": "http://10.0.0.1:8000"}))


def test_a_release_never_overtakes_its_reservation() -> None:
    """The API would not know what to release, and the amount would stay reserved as long as the gateway lives."""
    events: list[str] = []

    async def scenario() -> None:
        answering = asyncio.Event()

        class Api:
            gateway = "g1"

            async def reserve(self, batch: ReservationBatch, timeout_s: float) -> dict[str, str]:
                events.extend(f"ask {one.id}" for one in batch.asked)
                await answering.wait()
                events.extend(f"grant {one.id}" for one in batch.asked)
                return {one.id: "" for one in batch.asked}

        class Reporter:
            def release(self, id: str) -> None:
                events.append(f"release {id}")

        budgets = KeyBudgets(Api(), Reporter())  # type: ignore[arg-type]
        key = ApiKey(id="key-1", name="web", team="red", user="ana", account="key-1")
        first = asyncio.create_task(budgets.reserve("first", key, 10))
        await until(lambda: events == ["ask first"])
        unsent = asyncio.create_task(budgets.reserve("unsent", key, 10))
        kept = asyncio.create_task(budgets.reserve("kept", key, 10))
        await asyncio.sleep(0)
        first.cancel()
        unsent.cancel()
        await asyncio.wait([first, unsent])
        assert events == ["ask first"]
        answering.set()
        await kept

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert events == ["ask first", "grant first", "release first", "ask kept", "grant kept"]
