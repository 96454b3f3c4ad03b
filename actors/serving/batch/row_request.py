"""Runs one row of a batch: passes the HTTP request that the row describes to the server's app, without a socket."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Scope

from raytide.actors.serving.batch.input_file import InputRow
from raytide.actors.serving.batch.progress_file import RowResult, RowUsage
from raytide.actors.serving.openai_api.errors import ApiError

_RETRIED = frozenset({429, 503, 504})
"""Statuses of requests for which there was no room: they are sent again until the batch ends."""
_MAX_ERRORS = 3
"""The most attempts at a row that fails in the server or whose replica dies."""
_BACKOFF_S = (0.1, 15.0)


async def request_row(app: ASGIApp, place: int, row: InputRow, scope: Callable[[], Mapping[str, Any]]) -> RowResult:
    """Runs a row and returns its result. If the server has no room, the request is sent again until the server has
    room. If the server fails, the request is tried three times in all. A response with the header `x-should-retry:
    false` is final.

    `scope()` is called for each attempt and returns entries of the ASGI scope, such as the caller. If `scope()` raises
    an ApiError, the error counts as the answer to the attempt.
    """
    pause_s, errors = _BACKOFF_S[0], 0
    while True:
        try:
            status, headers, body = await _answer(app, row.url, json.dumps(row.body).encode(), scope())
        except ApiError as error:  # of `scope`
            status, headers, body = error.status, error.headers, error.body.model_dump()
        errors += status >= 500 and _code(body) != "overloaded"
        is_over = status not in _RETRIED and status < 500
        if is_over or errors >= _MAX_ERRORS or headers.get("x-should-retry") == "false":
            break
        await asyncio.sleep(pause_s * random.uniform(0.5, 1))
        pause_s = min(2 * pause_s, _BACKOFF_S[1])
    response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
    line = _line(row.custom_id, response, None)
    return RowResult(place, status == 200, line, _usage(body) if status == 200 else RowUsage())


def failed_row(place: int, custom_id: str, code: str, message: str) -> RowResult:
    """Returns the result of a row that had no response."""
    return RowResult(place, False, _line(custom_id, None, {"code": code, "message": message}))


def _line(custom_id: str, response: object, error: object) -> dict[str, object]:
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


async def _answer(
    app: ASGIApp, path: str, body: bytes, entries: Mapping[str, Any]
) -> tuple[int, dict[str, str], object]:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, content = 500, dict[str, str](), bytearray()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays; a cancelled task ends the request
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(
                {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
            )
        content.extend(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        **entries,
    }
    try:
        await app(scope, receive, send)
    except Exception:
        if not content:  # Starlette answers a failure and raises it again
            raise
    return status, headers, _json(bytes(content))


def _json(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _code(body: object) -> object:
    error = body.get("error") if isinstance(body, Mapping) else None
    return error.get("code") if isinstance(error, Mapping) else None


def _usage(body: object) -> RowUsage:
    """Returns the token counts in the body of an answer, whatever API the answer belongs to."""
    usage = body.get("usage") if isinstance(body, Mapping) else None
    if not isinstance(usage, Mapping):
        return RowUsage()

    def first(*names: str) -> int:
        return next((int(usage[name]) for name in names if usage.get(name) is not None), 0)

    def detail(name: str, *places: str) -> int:
        return sum(int((usage.get(place) or {}).get(name) or 0) for place in places)

    return RowUsage(
        input_tokens=first("prompt_tokens", "input_tokens"),
        cached_tokens=detail("cached_tokens", "prompt_tokens_details", "input_tokens_details"),
        output_tokens=first("completion_tokens", "output_tokens"),
        reasoning_tokens=detail("reasoning_tokens", "completion_tokens_details", "output_tokens_details"),
    )
