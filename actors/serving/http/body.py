"""Reads JSON bodies within limits of size, time and structure, so that clients cannot exhaust memory or time."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from raytide.actors.engine.limits import (
    BODY_TIMEOUT_S,
    MAX_BODY_BYTES,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_TEXTS,
    MAX_JSON_VALUES,
)
from raytide.actors.serving.openai_api.errors import ApiError, invalid, too_large

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*("?)', re.DOTALL)
_STRING_REST = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json\b", re.IGNORECASE)
_PIECE_BYTES = 1 << 16


class Outline:
    """Counts the values of a JSON text and the depth of their nesting, piece by piece as the text arrives. Raises
    ApiError as soon as a limit is exceeded, before the parser runs.
    """

    def __init__(self) -> None:
        self._values, self._texts, self._containers, self._depth = 1, 0, 0, 0
        self._in_string = self._is_escaped = False

    def feed(self, piece: bytes) -> None:
        start = 0
        if self._is_escaped and piece:
            start, self._is_escaped = 1, False
        if self._in_string:
            rest = _STRING_REST.match(piece, start)
            assert rest is not None
            start = rest.end()
            if start == len(piece):
                return
            if piece[start : start + 1] == b"\\":  # the last byte
                self._is_escaped = True
                return
            start, self._in_string = start + 1, False
        outside, strings = _STRING.subn(rb"\1", piece[start:])
        if strings > outside.count(b'"'):
            self._in_string = True
            self._is_escaped = outside.endswith(b"\\")
        opened = outside.count(b"[") + outside.count(b"{")
        self._texts += strings
        self._containers += opened
        self._values += outside.count(b",") + opened
        for count, most, what in (
            (self._values, MAX_JSON_VALUES, "values"),
            (self._texts, MAX_JSON_TEXTS, "texts"),
            (self._containers, MAX_JSON_CONTAINERS, "lists and objects"),
        ):
            if count > most:
                raise invalid(f"The body has more than {most} JSON {what}.", param=None)
        for bracket in outside.translate(None, _NO_BRACKETS):
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > MAX_JSON_DEPTH:
                raise invalid(f"The body has JSON more than {MAX_JSON_DEPTH} levels deep.", param=None)


def parse_json(raw: bytes) -> object:
    """Parses JSON in UTF-8. If a key is repeated, the last value counts. `5.0` is an integer, as in JSON Schema.

    Raises ApiError (400) for invalid JSON, NaN, infinity, too long numbers and unpaired surrogates.
    """
    try:
        parsed: object = json.loads(raw.decode("utf-8-sig"), parse_float=_number, parse_constant=_no_constant)
        if _SURROGATE.search(raw):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("The body has half a surrogate pair in a text.", param=None) from None
    except UnicodeDecodeError:
        raise invalid("The body is not valid UTF-8.", param=None) from None
    except (ValueError, RecursionError):
        raise invalid("The body is not valid JSON.", param=None) from None
    return parsed


def _number(text: str) -> float | int:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large")
    return int(value) if -(2.0**53) <= value <= 2.0**53 and value.is_integer() else value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


class JsonBody(Request):
    """A request with a JSON body, which `load` reads and parses."""

    async def load(self, outline: Outline) -> None:
        """Reads and parses the body. Raises ApiError with one of these statuses:

        - 413: the body is too large.
        - 408: the body arrives too slowly.
        - 415: the body is compressed or has another content type.
        - 400: the body is not JSON, has too many values or too deep a nesting, or is cut off by a closed
          connection.
        """
        if self.headers.get("content-encoding", "identity") != "identity":
            raise invalid("A compressed body is not supported.", param=None, status=415)
        if not _JSON_TYPE.match(self.headers.get("content-type", "")):  # a web page may send other types unasked
            raise invalid("The body must have the content type application/json.", param=None, status=415)
        length = self.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > MAX_BODY_BYTES):
            raise too_large(MAX_BODY_BYTES)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                self._body = await self._read(outline)
        except TimeoutError:
            raise invalid(f"The body did not come within {BODY_TIMEOUT_S:g} s.", param=None, status=408) from None
        except ClientDisconnect:
            raise invalid("The connection was closed before the body had come.", param=None) from None
        self._json = parse_json(self._body) if self._body else None

    async def _read(self, outline: Outline) -> bytes:
        whole = bytearray()
        async for chunk in self.stream():
            if len(whole) + len(chunk) > MAX_BODY_BYTES:
                raise too_large(MAX_BODY_BYTES)
            whole += chunk
            for start in range(0, len(chunk), _PIECE_BYTES):
                outline.feed(chunk[start : start + _PIECE_BYTES])
                await asyncio.sleep(0)
        return bytes(whole)


class JsonRoute(APIRoute):
    """A FastAPI route that reads the request's body as a JsonBody, so that this module's limits apply."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def limited(request: Request) -> Response:
            body = JsonBody(request.scope, request.receive)
            try:
                await body.load(Outline())
            except ApiError:
                request.app.state.count_refused_body(request.url.path)
                raise
            return await handle(body)

        return limited
