"""The responses that a server without a gateway keeps."""

from __future__ import annotations

import pytest

from raytide.actors.serving.protocols.responses_api import stored
from raytide.actors.serving.protocols.responses_api.stored import (
    KEEP_S,
    MemoryResponses,
    ResponseOwner,
    StoredResponse,
    input_items,
)

OWNER = ResponseOwner("web", "account")


def response(name: str, text: str = "") -> StoredResponse:
    return StoredResponse(name, "m", {"id": name, "output": [{"type": "message", "text": text}]}, input_items("x"))


async def kept(store: MemoryResponses, *names: str) -> list[str]:
    return [name for name in names if await store.get("web", name) is not None]


async def test_the_oldest_make_room_for_new_ones() -> None:
    store = MemoryResponses(max_responses=2)
    for name in "abc":
        await store.add(OWNER, response(name))
    assert await kept(store, "a", "b", "c") == ["b", "c"]
    small = MemoryResponses(max_bytes=2500)
    for name in "abc":
        await small.add(OWNER, response(name, "x" * 1000))
    assert await kept(small, "a", "b", "c") == ["b", "c"]
    assert await small.delete("web", "b")
    await small.add(OWNER, response("d", "x" * 1000))
    assert await kept(small, "c", "d") == ["c", "d"]


async def test_they_belong_to_a_team_and_expire() -> None:
    now_s = [0.0]
    store = MemoryResponses(now_s=lambda: now_s[0])
    await store.add(OWNER, response("a"))
    assert await store.get("other", "a") is None
    assert not await store.delete("other", "a")
    assert await store.get("web", "a") == response("a") or await kept(store, "a")
    now_s[0] = KEEP_S + 1.0
    assert await kept(store, "a") == []
    assert not await store.delete("web", "a")


async def test_one_that_is_too_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MAX_RESPONSE_BYTES", 500)
    store = MemoryResponses()
    await store.add(OWNER, response("a", "x" * 500))
    assert await kept(store, "a") == []
