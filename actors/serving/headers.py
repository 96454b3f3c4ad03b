"""The headers that every response of a replica carries."""

from __future__ import annotations

import time
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ResponseHeaders"]


class ResponseHeaders:
    """`x-request-id` (the client's own, if it sent one), `openai-processing-ms`, `x-raytide-replica`.

    Plain ASGI: Starlette's BaseHTTPMiddleware would hide a client's disconnect from the routes.
    """

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app = app
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        request_id = Headers(scope=scope).get("x-request-id") or f"req_{uuid4().hex}"

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round((time.perf_counter() - began_s) * 1e3))
                headers["x-raytide-replica"] = self._replica
            await send(message)

        await self._app(scope, receive, send_with_headers)
