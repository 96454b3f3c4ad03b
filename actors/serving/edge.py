"""What Serve's HTTP proxy cannot say in OpenAI's words by itself: refusals, lost replicas, streams cut in the middle.

Serve loads `middlewares` into its proxy by import path. Without it a client would see plain-text errors, and a stream
whose replica died would end as a broken connection instead of an error event.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytide.actors.serving.errors import ApiError, invalid, overloaded
from raytide.actors.serving.wire import sse

__all__ = ["IMPORT_PATH", "OpenAIEdge", "middlewares"]

IMPORT_PATH = f"{__name__}:middlewares"


def middlewares() -> list[Middleware]:
    return [Middleware(OpenAIEdge)]


class OpenAIEdge:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        response = _Response(send, scope["path"])
        await self._app(scope, receive, response.send)
        await response.close()


class _Response:
    """One response on its way out."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._start: Message | None = None
        self._refusal = b""
        self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            _keep_first_request_id(message)
            if not self._is_refusal():
                await self._send(message)
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        if self._is_refusal() and message["type"] == "http.response.body":
            self._refusal += message.get("body", b"")
            if self._ended:
                await self._send_error(_refused(self._status, self._refusal.decode(errors="replace"), self._path))
            return
        await self._send(message)

    async def close(self) -> None:
        """Called when the proxy has nothing more to say: whatever is still open lost its replica."""
        if self._ended:
            return
        if self._start is None or self._is_refusal():
            await self._send_error(_lost("The replica was lost before it answered; sending the request again is safe."))
        elif self._headers.get("content-type", "").startswith("text/event-stream"):
            event = sse(_lost("The replica was lost in the middle of this answer.").body.model_dump_json())
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    @property
    def _headers(self) -> MutableHeaders:
        assert self._start is not None
        return MutableHeaders(scope=self._start)

    @property
    def _status(self) -> int:
        return int(self._start["status"]) if self._start else 0

    def _is_refusal(self) -> bool:
        """An error in the proxy's own words; a replica's errors are JSON already."""
        return self._status >= 400 and not self._headers.get("content-type", "").startswith("application/json")

    async def _send_error(self, error: ApiError) -> None:
        body = error.body.model_dump_json().encode()
        headers = MutableHeaders(headers=error.headers)
        headers["content-type"] = "application/json"
        headers["content-length"] = str(len(body))
        if self._start is not None:
            for name in ("x-request-id", "retry-after"):
                if name in self._headers:
                    headers[name] = self._headers[name]
        await self._send({"type": "http.response.start", "status": error.status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})


def _refused(status: int, text: str, path: str) -> ApiError:
    if status == 429:
        return overloaded("Every replica is busy and the queue is full.")
    if status == 404:
        return invalid(f"No endpoint answers {path}.", param=None, code="not_found", status=404)
    code = "overloaded" if status == 503 else None
    return ApiError(status, text or "The server failed.", type="server_error", code=code)


def _lost(message: str) -> ApiError:
    return ApiError(503, message, type="server_error", code="replica_lost")


def _keep_first_request_id(start: Message) -> None:
    """The replica and the proxy both write the same x-request-id."""
    headers = MutableHeaders(scope=start)
    request_id = headers.get("x-request-id")
    if request_id is not None:
        del headers["x-request-id"]
        headers["x-request-id"] = request_id
