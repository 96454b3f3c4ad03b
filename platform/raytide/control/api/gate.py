"""ASGI middleware that authenticates requests and limits their bodies.

The sender is authenticated before the body is read. A body has a deadline and a size limit that depends on the route.
Therefore huge or slow bodies hold neither memory nor a connection for long. Routes find the caller in
`request.state.caller`. Uploaded packages are streamed to their route. Every other body is received whole before its
route runs.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytide.control.api.auth import GATEWAY_ROUTES, Caller, Tokens
from raytide.core.errors import AuthError, RaytideError, TooLargeError, TooSlowError
from raytide.core.io.working_dir import MOST_BYTES
from raytide.core.state.tenancy.audit import acting

SPEC_BYTES = 2**20
"""The largest body of a job's or endpoint's spec, or of a gateway's report."""
BODY_BYTES = 2**16
"""The largest body of every other request."""
BODY_S = 20.0
"""The time within which a body must arrive."""
CHUNK_S = 30.0
"""The time within which each chunk of a package must arrive."""
PACKAGE_S = 300.0
"""The time within which a package must arrive."""

_OPEN = frozenset({"/", "/health", "/metrics", "/v1/targets"})
"""Paths that need no token and take no body: nothing there is secret."""
_OPEN_FILES = "/page/"
"""The path of the web page's files, which hold no data: the page asks for a token as every client does."""
_ONLY_READ = frozenset({"GET", "HEAD", "OPTIONS"})
_SPECS = frozenset({"/v1/jobs", "/v1/endpoints", "/v1/models", "/v1/rollouts", "/v1/alerts/webhook"})
_PACKAGE = re.compile(r"/v1/packages/[^/]*")
_DISCARDED_BYTES, _DISCARD_S = 2**24, 2.0
_CLOSE = {"Connection": "close"}


class Gate:
    """Middleware that authenticates requests and limits their bodies.

    It responds with 401 if there is no valid token, and with 403 if the token may not use the route. It responds
    with 413 if a body is too large, and with 408 if a body arrives too slowly.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens,
        now_s: Callable[[], float] = time.time,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called after each request that may have changed something."""
        self._app, self._tokens, self._now_s, self._on_change = app, tokens, now_s, on_change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = Caller("", "")
        try:
            if scope["path"] not in _OPEN and not scope["path"].startswith(_OPEN_FILES):
                caller = await self._tokens.caller(_authorization(scope["headers"]))
                caller.require_route(scope["path"])
                scope.setdefault("state", {})["caller"] = caller
            elif _has_body(scope["headers"]):
                raise TooLargeError(f"{scope['path']} takes no body.", hint="Send the request without a body.")
            admitted = await _admit(scope, receive)
        except RaytideError as error:
            await _refuse(error)(scope, receive, send)
        except TimeoutError:
            late = TooSlowError(f"the request's body did not arrive within {BODY_S:g} s.", hint="Send it again.")
            await _refuse(late)(scope, receive, send)
        else:
            if admitted is not None:
                with acting(caller.name, self._now_s()):
                    await self._app(scope, admitted, send)
                if scope["method"] not in _ONLY_READ:
                    self._on_change()


async def _admit(scope: Scope, receive: Receive) -> Receive | None:
    """Returns a `receive` for the route that keeps the body within its limits; None if the client disconnected."""
    headers = scope["headers"]
    if not _has_body(headers):
        return receive
    path = scope["path"]
    is_package = scope["method"] == "PUT" and _PACKAGE.fullmatch(path)
    if is_package:
        most = MOST_BYTES
    else:
        is_large = scope["method"] == "POST" and (path in _SPECS or path.startswith(GATEWAY_ROUTES))
        most = SPEC_BYTES if is_large else BODY_BYTES
    announced = _length(headers)
    if announced is not None and announced > most:
        await _discard(receive, announced)
        raise _too_large(most)
    return _streamed(receive, most) if is_package else await _buffered(receive, most)


async def _buffered(receive: Receive, most: int) -> Receive | None:
    parts: list[bytes] = []
    size, deadline_s = 0, time.monotonic() + BODY_S
    while True:
        message = await asyncio.wait_for(receive(), max(0.0, deadline_s - time.monotonic()))
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            parts.clear()
            await _discard(receive, _DISCARDED_BYTES)
            raise _too_large(most)
        parts.append(part)
        if not message.get("more_body", False):
            break
    body: Message | None = {"type": "http.request", "body": b"".join(parts), "more_body": False}

    async def replayed() -> Message:
        nonlocal body
        message, body = body, None
        return await receive() if message is None else message

    return replayed


def _streamed(receive: Receive, most: int) -> Receive:
    size, deadline_s = 0, time.monotonic() + PACKAGE_S

    async def counted() -> Message:
        nonlocal size
        left_s = deadline_s - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, min(CHUNK_S, left_s)))
        except TimeoutError:
            raise TooSlowError("the package arrived too slowly.", hint="Leave large files out of it.") from None
        size += len(message.get("body", b""))
        if size > most:
            raise _too_large(most)
        return message

    return counted


async def _discard(receive: Receive, size: int) -> None:
    """Reads the rest of a body for a moment, because closing a connection with unread bytes would reset it before the
    client reads the response."""
    deadline_s, left = time.monotonic() + _DISCARD_S, min(size, _DISCARDED_BYTES)
    try:
        while left > 0 and (wait_s := deadline_s - time.monotonic()) > 0:
            message = await asyncio.wait_for(receive(), wait_s)
            if message["type"] != "http.request" or not message.get("more_body", False):
                return
            left -= len(message.get("body", b""))
    except TimeoutError:
        return


def _authorization(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    found = [value for name, value in headers if name == b"authorization"]
    if len(found) > 1:
        raise AuthError("more than one Authorization header was sent.", hint="Send one.")
    return found[0].decode("latin-1") if found else None


def _length(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """Returns the body's announced length in bytes; None if there is none, 2**63 for an invalid one."""
    found = [value for name, value in headers if name == b"content-length"]
    if not found:
        return None
    return int(found[0]) if found[0].isdigit() and len(found[0]) < 19 else 2**63


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        (name == b"content-length" and value.strip() != b"0") or name == b"transfer-encoding" for name, value in headers
    )


def _too_large(most: int) -> TooLargeError:
    size = f"{most // 2**20} MiB" if most >= 2**20 else f"{most // 2**10} KiB"
    return TooLargeError(f"the request's body is larger than {size}.", hint="Send a smaller body.")


def _refuse(error: RaytideError) -> JSONResponse:
    """Returns the error as a response, which closes the connection, because the rest of the body is not read."""
    return JSONResponse({"error": error.to_json()}, status_code=error.http_status, headers=_CLOSE)
