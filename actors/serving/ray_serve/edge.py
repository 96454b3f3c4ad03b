"""Middleware in Serve's HTTP proxy: refusals, lost replicas and interrupted streams as OpenAI errors, limits on request
size and slow clients, and a retry on another replica when the engine is dead.

Serve loads `middlewares` into its proxy by import path. Without it clients would see plain-text errors, and a stream
whose replica died would end as a broken connection instead of an error event.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytide.actors.engine.limits import MAX_BODY_BYTES, SEND_TIMEOUT_S
from raytide.actors.serving.openai_api.errors import RETRY_ELSEWHERE, ApiError, invalid, overloaded, too_large
from raytide.actors.serving.openai_api.wire import sse

IMPORT_PATH = f"{__name__}:middlewares"

_PAUSES_S = (0.5, 1.0, 2.0)
"""The pauses before retries; a replica whose engine is dead ends itself within two seconds."""
_DISCONNECT: Message = {"type": "http.disconnect"}


def middlewares() -> list[Middleware]:
    return [Middleware(OpenAIEdge)]


class OpenAIEdge:
    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        send_timeout_s: float = SEND_TIMEOUT_S,
        pauses_s: tuple[float, ...] = _PAUSES_S,
    ) -> None:
        self._app = app
        self._max_body_bytes, self._send_timeout_s, self._pauses_s = max_body_bytes, send_timeout_s, pauses_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        upload = _Upload(receive, self._max_body_bytes)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_body_bytes):
            await _Response(send, scope["path"], upload, self._send_timeout_s).send_error(
                too_large(self._max_body_bytes)
            )
            return
        for pause_s in (*self._pauses_s, None):
            response = _Response(send, scope["path"], upload, self._send_timeout_s, may_retry=pause_s is not None)
            # Serve takes the route off the path in place.
            await self._app({**scope, "headers": list(scope["headers"])}, upload.receive, response.send)
            if not response.is_to_retry or pause_s is None:
                break
            await asyncio.sleep(pause_s)
            upload.rewind()
        await response.close()


class _Upload:
    """The request's body. It is kept until the answer begins, so that it can be sent again."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self.limit = limit
        self._size = 0
        self._kept: list[Message] | None = []
        self._again: list[Message] = []
        self._given_up = asyncio.Event()
        self.is_too_large = False

    async def receive(self) -> Message:
        if self._again:
            return self._again.pop(0)
        if self._given_up.is_set():
            return _DISCONNECT
        message = await self._next()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self.limit:
                self.is_too_large = True
                self.give_up()
                return _DISCONNECT
            if self._kept is not None:
                self._kept.append(message)
        return message

    def give_up(self) -> None:
        """Treats the client as disconnected: the proxy then ends the replica's work for it."""
        self._kept = None
        self._given_up.set()

    def answered(self) -> None:
        self._kept = None

    def rewind(self) -> None:
        self._again = list(self._kept or ())

    async def _next(self) -> Message:
        """Returns the client's next message, or a disconnect once the client is given up."""
        coming, leaving = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({coming, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else _DISCONNECT
        finally:
            coming.cancel()
            leaving.cancel()


class _Response:
    """One response to a client."""

    def __init__(
        self, send: Send, path: str, upload: _Upload, send_timeout_s: float, *, may_retry: bool = False
    ) -> None:
        self._client = send
        self._path = path
        self._upload = upload
        self._send_timeout_s = send_timeout_s
        self._may_retry = may_retry
        self._start: Message | None = None
        self._refusal = b""
        self._ended = False
        self._is_stuck = False
        self.is_to_retry = False

    async def send(self, message: Message) -> None:
        if self._upload.is_too_large and not self._is_begun:
            return
        if message["type"] == "http.response.start":
            if self._may_retry and Headers(scope=message).get(RETRY_ELSEWHERE) is not None:
                self.is_to_retry = True
                return
            self._start = message
            _keep_first_request_id(message)
            if not self._is_refusal():
                self._upload.answered()
                await self._send(message)
            return
        if self.is_to_retry:
            return
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._ended = True
        if self._is_refusal() and message["type"] == "http.response.body":
            self._refusal += message.get("body", b"")
            if self._ended:
                await self.send_error(_refused(self._status, self._refusal.decode(errors="replace"), self._path))
            return
        await self._send(message)

    async def close(self) -> None:
        """Ends a response that the proxy left open, because its replica was lost."""
        if self._ended or self._is_stuck:
            return
        if not self._is_begun:
            if self._upload.is_too_large:
                await self.send_error(too_large(self._upload.limit))
                return
            await self.send_error(_lost("The replica was lost before it answered; sending the request again is safe."))
        elif self._headers.get("content-type", "").startswith("text/event-stream"):
            event = sse(_lost("The replica was lost in the middle of this answer.").body.model_dump_json())
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def send_error(self, error: ApiError) -> None:
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

    async def _send(self, message: Message) -> None:
        """Sends to the client, and gives it up after the timeout: unread data stays in this process's memory."""
        if self._is_stuck:
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._client(message)
        except TimeoutError:
            self._is_stuck = True
            self._upload.give_up()

    @property
    def _headers(self) -> MutableHeaders:
        assert self._start is not None
        return MutableHeaders(scope=self._start)

    @property
    def _status(self) -> int:
        return int(self._start["status"]) if self._start else 0

    @property
    def _is_begun(self) -> bool:
        """True once the client has the head of an answer."""
        return self._start is not None and not self._is_refusal()

    def _is_refusal(self) -> bool:
        """Returns whether this is an error of the proxy itself; a replica's errors are JSON."""
        return self._status >= 400 and not self._headers.get("content-type", "").startswith("application/json")


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
    """Keeps one x-request-id of the same two that the replica and the proxy write."""
    headers = MutableHeaders(scope=start)
    request_id = headers.get("x-request-id")
    if request_id is not None:
        del headers["x-request-id"]
        headers["x-request-id"] = request_id
