from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.gateway.tenancy.conftest import Line

from raytide.actors.serving.openai_api.admission import CALLER, BatchRow, caller_of
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.core.state import Store
from raytide.gateway.app import Authentication
from raytide.gateway.tenancy.tenancy import Tenancy

ROW = BatchRow("batch_1-0-row", may_be_running=False)


async def who(scope: Scope, receive: Receive, send: Send) -> None:
    """Responds with the team of the caller; an open path has none."""
    text = caller_of(scope).team if scope["path"].startswith("/v1/") else "open"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": text.encode()})


def test_callers_are_known_before_the_body_is_read(line: Line, secret_of: Callable[..., str]) -> None:
    secret = secret_of(team="blue")

    async def run() -> None:
        tenancy = Tenancy(line.api(), requires_keys=True)
        tenancy.start()
        await asyncio.wait_for(tenancy.keys.synced.wait(), 60)
        app = Authentication(who, tenancy)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as http:
            known = {"Authorization": f"Bearer {secret}"}
            assert (await http.post("/v1/chat/completions", headers=known)).text == "blue"
            as_anthropic = await http.post("/v1/messages", headers={"x-api-key": secret})
            assert as_anthropic.text == "blue"
            assert (await http.get("/health")).text == "open"
            refused = await http.post("/v1/chat/completions", headers={"Authorization": "Bearer sk-x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            wrong = await http.post("/v1/messages/count_tokens", headers={"x-api-key": "sk-x"})
            assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
            for path in ("/tokenize", "/detokenize", "/score", "/rerank"):
                assert (await http.post(path)).status_code == 401
            assert (refused.headers["connection"], refused.headers["www-authenticate"]) == ("close", "Bearer")
        await refused_without_reading(app)
        await tenancy.close()

    asyncio.run(run())


async def refused_without_reading(app: Authentication) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": []}, receive, send)
    assert sent[0]["status"] == 401
    assert json.loads(sent[1]["body"])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions"])
def test_where_no_keys_are_demanded_everybody_is_the_default_team(line: Line, path: str) -> None:
    async def run() -> None:
        tenancy = Tenancy(line.api(), requires_keys=False)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(Authentication(who, tenancy)), base_url="http://g"
        ) as http:
            assert (await http.get(path)).text == "default"

    asyncio.run(run())


def test_a_row_of_a_batch_runs_for_the_account_of_its_key(
    line: Line, store: Store, secret_of: Callable[..., str]
) -> None:
    """Its request comes with a caller and no secret; it goes on with a rotated key, and ends with the last one."""
    secret_of(team="blue")

    async def run() -> None:
        tenancy = Tenancy(line.api(), requires_keys=True)
        tenancy.start()
        await asyncio.wait_for(tenancy.keys.synced.wait(), 60)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            raise AssertionError

        who_asks = tenancy.caller_of_account("key-1", ROW)
        scope = {"type": "http", "path": "/v1/completions", "headers": [], CALLER: who_asks}
        await Authentication(who, tenancy)(scope, receive, send)
        assert sent[1]["body"] == b"blue"
        store.tenancy.keys.rotate("key-1", "digest", 2.0, 0.0)
        await eventually(lambda: tenancy.caller_of_account("key-1", ROW).key.id == "key-2")  # type: ignore[union-attr]
        store.tenancy.keys.revoke("key-2", 3.0)
        await eventually(lambda: refusal_of(tenancy, "key-1") == 401)
        assert refusal_of(tenancy, "") == 401, "a batch of times without keys ends where they are demanded"
        await tenancy.close()

    asyncio.run(run())


def refusal_of(tenancy: Tenancy, account: str) -> int:
    try:
        tenancy.caller_of_account(account, ROW)
    except ApiError as error:
        return error.status
    return 0


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
