from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.gateway.tenancy.conftest import Line

from raytide.actors.serving.openai_api.admission import caller_of
from raytide.gateway.tenancy.authentication import Authentication
from raytide.gateway.tenancy.tenancy import Tenancy


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
        await asyncio.wait_for(tenancy.keys.synced.wait(), 10)
        app = Authentication(who, tenancy)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g") as http:
            known = {"Authorization": f"Bearer {secret}"}
            assert (await http.post("/v1/chat/completions", headers=known)).text == "blue"
            assert (await http.get("/health")).text == "open"
            refused = await http.post("/v1/chat/completions", headers={"Authorization": "Bearer sk-x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
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
