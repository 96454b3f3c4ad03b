from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import anyio.to_thread
import pytest
from tests.gateway.tenancy.conftest import Line
from tests.virtual_loop import run_virtually

from raytide.actors.serving.openai_api.errors import ApiError
from raytide.control.api.tenancy_routes import POLL_S
from raytide.core.objects.api_key import ApiKey, KeyTableChange, TokenPrice, digest_of_secret, new_secret
from raytide.core.state import Store
from raytide.gateway.tenancy.key_table import MOST_STALE_S, KeyTable

SECRET = new_secret()
KEY = ApiKey("key-1", "web", "blue", "ana", "key-1", expires_at_s=100.0)


class Times:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def times() -> Times:
    return Times()


@pytest.fixture
def keys(line: Line, times: Times) -> KeyTable:
    """A table whose API is cut, so that it holds what a test applies."""
    line.is_cut = True
    return KeyTable(line.api(), times, times)


def accepted(keys: KeyTable, secret: str = SECRET) -> ApiKey:
    return asyncio.run(keys.key(secret))


def change(revision: int, *keys: tuple[str, ApiKey], is_whole: bool = False, **prices: float) -> KeyTableChange:
    table = {digest_of_secret(secret): key for secret, key in keys}
    costs = {name: TokenPrice(prompt=usd) for name, usd in prices.items()}
    return KeyTableChange(revision, is_whole, table, costs, {"blue": 2.0})


def refusal(keys: KeyTable, secret: str = SECRET) -> ApiError:
    with pytest.raises(ApiError) as refused:
        accepted(keys, secret)
    return refused.value


def test_a_known_key_is_accepted_until_it_expires(keys: KeyTable, times: Times) -> None:
    keys.apply(change(1, (SECRET, KEY), is_whole=True, chat=3.0))
    assert accepted(keys) == KEY
    assert (keys.price("chat").prompt, keys.price("chat:adapter").prompt, keys.price("other").prompt) == (3.0, 3.0, 0.0)
    assert (keys.weight("blue"), keys.weight("red")) == (2.0, 1.0)
    times.now_s = 100.0
    assert refusal(keys).status == 401


def test_a_wrong_key_is_refused_as_openai_does_without_repeating_it(line: Line, keys: KeyTable) -> None:
    keys.apply(change(1, (SECRET, KEY), is_whole=True))
    line.is_cut = False
    error = refusal(keys, wrong := new_secret())
    assert (error.status, error.body.error.type, error.body.error.code) == (
        401,
        "invalid_request_error",
        "invalid_api_key",
    )
    assert wrong not in error.body.error.message
    assert wrong[:5] in error.body.error.message


def test_changes_add_replace_and_remove_keys(keys: KeyTable) -> None:
    other = new_secret()
    keys.apply(change(1, (SECRET, KEY), is_whole=True))
    keys.apply(change(2, (other, ApiKey("key-2", "x", "red", "bob", "key-2"))))
    assert accepted(keys, other).id == "key-2"
    assert accepted(keys).id == "key-1"
    keys.apply(change(3, (SECRET, ApiKey("key-1", "web", "blue", "ana", "key-1", revoked_at_s=49.0))))
    assert refusal(keys).status == 503  # unknown, and the API cannot be asked
    keys.apply(change(2, (SECRET, KEY)))  # of a poll that was answered before the key was revoked
    assert refusal(keys).status == 503
    keys.apply(change(1, is_whole=True))  # of a store that was restored
    assert refusal(keys, other).status == 503


def test_without_the_api_known_keys_are_served_for_a_bounded_time(keys: KeyTable, times: Times) -> None:
    assert refusal(keys).status == 503
    forever = ApiKey("key-1", "web", "blue", "ana", "key-1")
    keys.apply(change(1, (SECRET, forever), is_whole=True))
    assert accepted(keys) == forever
    assert refusal(keys, new_secret()).status == 503  # it may be new
    times.now_s += MOST_STALE_S + 1
    error = refusal(keys)
    assert (error.status, error.headers) == (503, {"retry-after": "1"})


def test_a_key_that_was_made_a_moment_ago_is_accepted(line: Line, secret_of: Callable[..., str]) -> None:
    async def run() -> None:
        keys = KeyTable(line.api())
        keys.apply(change(0, is_whole=True))
        assert (await keys.key(secret_of())).id == "key-1"

    asyncio.run(run())


def test_wrong_keys_of_one_moment_share_a_look_at_the_api(line: Line) -> None:
    async def run() -> None:
        keys = KeyTable(line.api())
        keys.apply(change(0, is_whole=True))
        refused = await asyncio.gather(*(keys.key(new_secret()) for _ in range(100)), return_exceptions=True)
        assert {each.status for each in refused if isinstance(each, ApiError)} == {401}

    asyncio.run(run())
    assert len(line.calls) <= 2


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the API's blocking work in the event loop, whose time is virtual and must not pass meanwhile."""

    async def at_once(work: Callable[..., object], *args: object, **options: object) -> object:
        return work(*args)

    monkeypatch.setattr(anyio.to_thread, "run_sync", at_once)


@pytest.mark.parametrize("phase", range(10))
@pytest.mark.parametrize("is_cut", [False, True])
def test_a_revoked_key_is_refused_within_a_second(
    line: Line, store: Store, secret_of: Callable[..., str], no_threads: None, phase: int, is_cut: bool
) -> None:
    """The time is virtual: it has the waits of two gateways and of the API, and no load of this machine. The key is
    revoked at any moment of their polls, also of polls that fail: then the second counts from the API's return. The
    last quarter of the second is left for what takes real time.
    """
    secret = secret_of()

    async def run() -> float:
        clock, gateways = asyncio.get_running_loop(), [KeyTable(line.api(name)) for name in ("g1", "g2")]
        following = []
        for keys in gateways:
            following.append(asyncio.create_task(keys.follow()))
            await keys.synced.wait()
            await asyncio.sleep(1.0 + 0.37 * POLL_S)
        await asyncio.sleep(phase * POLL_S / 10)  # a poll lasts 10 s
        if is_cut:
            line.is_cut = True
            await asyncio.sleep(15.0)
        assert [(await keys.key(secret)).id for keys in gateways] == ["key-1"] * 2
        store.tenancy.keys.revoke("key-1", 2.0)
        line.is_cut, revoked_s = False, clock.time()
        while any([await is_accepted(keys, secret) for keys in gateways]):
            await asyncio.sleep(0.01)
            assert clock.time() < revoked_s + 60
        for task in following:
            task.cancel()
        return clock.time() - revoked_s

    assert run_virtually(run()) < 0.75


def test_the_table_is_followed_again_after_the_api_was_away(line: Line, secret_of: Callable[..., str]) -> None:
    async def run() -> None:
        line.is_cut = True
        keys = KeyTable(line.api())
        following = asyncio.create_task(keys.follow())
        await asyncio.sleep(0)
        secret = secret_of()
        assert not await is_accepted(keys, secret)
        line.is_cut = False
        await asyncio.wait_for(keys.synced.wait(), 60)
        assert (await keys.key(secret)).id == "key-1"
        following.cancel()

    asyncio.run(run())


async def is_accepted(keys: KeyTable, secret: str) -> bool:
    try:
        return bool(await keys.key(secret))
    except ApiError:
        return False


def test_a_key_of_an_endpoint_may_use_its_adapters_and_one_of_an_adapter_only_that() -> None:
    base, adapter = (replace(KEY, models=models) for models in (("chat",), ("chat:polite",)))
    assert [base.allows(model) for model in ("chat", "chat:polite", "other", "other:chat")] == [
        True,
        True,
        False,
        False,
    ]
    assert [adapter.allows(model) for model in ("chat", "chat:polite", "chat:terse")] == [False, True, False]
