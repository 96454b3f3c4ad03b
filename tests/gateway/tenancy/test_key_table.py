from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.gateway.tenancy.conftest import Line
from tests.gateway.tenancy.test_usage import until

from raytide.actors.serving.openai_api.errors import ApiError
from raytide.core.objects.api_key import ApiKey, KeyTableChange, TokenPrice, digest_of_secret, new_secret
from raytide.gateway.tenancy.key_table import FRESH_S, MOST_STALE_S, KeyTable

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
    return KeyTable(line.api(), times, times)


def change(revision: int, *keys: tuple[str, ApiKey], is_whole: bool = False, **prices: float) -> KeyTableChange:
    table = {digest_of_secret(secret): key for secret, key in keys}
    costs = {name: TokenPrice(prompt=usd) for name, usd in prices.items()}
    return KeyTableChange(revision, is_whole, table, costs, {"blue": 2.0})


def refusal(keys: KeyTable, secret: str = SECRET) -> ApiError:
    with pytest.raises(ApiError) as refused:
        keys.key(secret)
    return refused.value


def is_refused(keys: KeyTable, secret: str) -> bool:
    try:
        keys.key(secret)
    except ApiError as error:
        return error.status == 401
    return False


def test_a_known_key_is_accepted_until_it_expires(keys: KeyTable, times: Times) -> None:
    keys.apply(change(1, (SECRET, KEY), is_whole=True, chat=3.0))
    assert keys.key(SECRET) == KEY
    assert (keys.price("chat").prompt, keys.price("chat:adapter").prompt, keys.price("other").prompt) == (3.0, 3.0, 0.0)
    assert (keys.weight("blue"), keys.weight("red")) == (2.0, 1.0)
    times.now_s = 100.0
    assert refusal(keys).status == 401


def test_a_wrong_key_is_refused_as_openai_does_without_repeating_it(keys: KeyTable) -> None:
    keys.apply(change(1, (SECRET, KEY), is_whole=True))
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
    assert keys.key(other).id == "key-2"
    assert keys.key(SECRET).id == "key-1"
    keys.apply(change(3, (SECRET, ApiKey("key-1", "web", "blue", "ana", "key-1", revoked_at_s=49.0))))
    assert refusal(keys).status == 401
    keys.apply(change(1, is_whole=True))  # of a store that was restored
    assert refusal(keys, other).status == 401


def test_without_the_api_known_keys_are_served_for_a_bounded_time(keys: KeyTable, times: Times) -> None:
    assert refusal(keys).status == 503
    forever = ApiKey("key-1", "web", "blue", "ana", "key-1")
    keys.apply(change(1, (SECRET, forever), is_whole=True))
    times.now_s += FRESH_S + 1
    assert keys.key(SECRET) == forever
    assert refusal(keys, new_secret()).status == 503  # it may be new
    times.now_s += MOST_STALE_S
    error = refusal(keys)
    assert (error.status, error.headers) == (503, {"retry-after": "1"})


def test_a_revoked_key_is_refused_long_before_the_next_poll_would_end(
    line: Line, store: object, secret_of: object
) -> None:
    """Each poll lasts 10 s without a change. The limit here is well below that."""
    secret = secret_of()  # type: ignore[operator]

    async def run() -> None:
        keys = KeyTable(line.api())
        following = asyncio.create_task(keys.follow())
        await asyncio.wait_for(keys.synced.wait(), 10)
        assert keys.key(secret).id == "key-1"
        store.tenancy.keys.revoke("key-1", 2.0)  # type: ignore[attr-defined]
        await until(lambda: is_refused(keys, secret), limit_s=5.0)
        following.cancel()

    asyncio.run(run())


def test_the_table_is_followed_again_after_the_api_was_away(line: Line, secret_of: object) -> None:
    async def run() -> None:
        line.is_cut = True
        keys = KeyTable(line.api())
        following = asyncio.create_task(keys.follow())
        await asyncio.sleep(0)
        secret = secret_of()  # type: ignore[operator]
        assert refusal(keys, secret).status == 503
        line.is_cut = False
        await asyncio.wait_for(keys.synced.wait(), 10)
        assert keys.key(secret).id == "key-1"
        following.cancel()

    asyncio.run(run())


def test_a_key_of_an_endpoint_may_use_its_adapters_and_one_of_an_adapter_only_that() -> None:
    base, adapter = (replace(KEY, models=models) for models in (("chat",), ("chat:polite",)))
    assert [base.allows(model) for model in ("chat", "chat:polite", "other", "other:chat")] == [
        True,
        True,
        False,
        False,
    ]
    assert [adapter.allows(model) for model in ("chat", "chat:polite", "chat:terse")] == [False, True, False]
