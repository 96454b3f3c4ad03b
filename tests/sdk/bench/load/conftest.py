"""A server of this process for loads: its answers are known, and a test may change them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Server:
    """An OpenAI-compatible server: each answer has as many tokens as asked for, unless `reply` says otherwise."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    reply: Callable[[dict[str, Any]], Response | None] = lambda body: None
    holds: threading.Event | None = None
    """If set, answers do not begin before it is."""

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        return self.reply(body) or StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            while self.holds is not None and not self.holds.is_set():  # noqa: ASYNC110  # a test's thread sets it
                await asyncio.sleep(0.01)
            for number in range(body["max_tokens"]):
                await asyncio.sleep(0)
                yield event({"choices": [{"index": 0, "text": str(number), "finish_reason": None}]})
            prompt = len(body["prompt"])
            details = {"cached_tokens": 1}
            usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
            yield event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1


def event(data: object) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    app = Starlette(routes=[Route("/v1/completions", found.completions, methods=["POST"])])
    running = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        thread.join(0.01)
    found.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/v1"
    yield found
    running.should_exit = True
    thread.join(10)
