"""The headers of every response, and a limit on how slowly a client may read."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytide.actors.engine.limits import SEND_TIMEOUT_S
from raytide.actors.serving.openai_api.admission import HEADERS

REQUEST_ID = "raytide.request_id"
"""The key of the ASGI scope with the id that the response's headers have."""
_MAX_ID_CHARS = 256


class ResponseHeaders:
    """Middleware that adds `x-request-id`, `request-id`, `openai-processing-ms` and `x-raytide-replica` to a response.

    `x-request-id` and `request-id` have the same value: the client's `x-request-id` if there is one, else a new id.
    Anthropic's clients read `request-id`. A HEAD request is answered as a GET, and the HTTP server leaves the body out.
    A response that its client leaves unread for SEND_TIMEOUT_S seconds is broken off.

    The middleware is plain ASGI, because Starlette's BaseHTTPMiddleware would hide a client's disconnect from the
    routes.
    """

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # a copy: the HTTP server looks at its own
        began_s = time.perf_counter()
        request_id = Headers(scope=scope).get("x-request-id") or f"req_{uuid4().hex}"
        request_id = scope[REQUEST_ID] = request_id[:_MAX_ID_CHARS]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - began_s) * 1e3))
                headers["x-raytide-replica"] = self._replica
                for name, value in scope.get(HEADERS, {}).items():
                    headers[name] = value
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await send(message)
            except TimeoutError:
                raise _ClientStalledError from None

        with suppress(_ClientStalledError):
            await self._app(scope, receive, send_with_headers)


class _ClientStalledError(Exception):
    """The client stopped reading. Waiting longer would keep the rest of its answer in memory and its request open."""
