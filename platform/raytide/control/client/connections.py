"""Connections to one HTTP server."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from raytide.core.errors import ConfigError

_AWAY = (502, 503, 504)
"""The statuses with which proxies answer for a server that is away."""


class HttpConnections:
    """Connections to one HTTP server, kept open between requests. Usable in several threads, and in forked processes.

    They use the standard library's HTTP client, because importing any other client takes longer than the rest of
    `raytide ps`.
    """

    def __init__(self, address: str, headers: Mapping[str, str]) -> None:
        """Raises ConfigError if the address is not an HTTP address."""
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"{address!r} is not the address of an API.", hint="Write http://HOST:PORT.")
        self._class = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._host, self._prefix, self._headers = url.netloc, url.path.rstrip("/"), headers
        self._idle: dict[int, list[http.client.HTTPConnection]] = {}
        """The idle connections of each process: a forked one must not read the answers to its parent."""

    def request(
        self, method: str, path: str, query: Mapping[str, Any], body: object, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Sends a request and returns the status and the body of the response.

        A `bytes` body is sent unchanged. None is sent as an empty body, and any other value as JSON. Query parameters
        that are None are left out.

        If the request fails on a reused connection, it is sent again on another connection, because the server may have
        closed the reused one. Raises OSError or HTTPException if no response comes, or only one of a proxy whose server
        is away.
        """
        headers, content = dict(self._headers), body if isinstance(body, bytes) else None
        if body is not content:
            headers["Content-Type"], content = "application/json", json.dumps(body, allow_nan=False).encode()
        given = ((name, value) for name, value in query.items() if value is not None)
        words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given}
        target = self._prefix + quote(path) + ("?" + urlencode(words) if words else "")
        idle = self._idle.setdefault(os.getpid(), [])
        while True:
            try:
                connection, is_new = idle.pop(), False
            except IndexError:
                connection, is_new = self._class(self._host), True
            try:
                answer = _exchange(connection, method, target, content, headers, timeout_s)
            except BaseException as error:
                connection.close()
                if is_new or not isinstance(error, ConnectionError | http.client.HTTPException):
                    raise
            else:
                idle.append(connection)
                if answer[0] in _AWAY and not _is_of_api(answer[1]):
                    raise http.client.HTTPException(f"a proxy answered {answer[0]}")
                return answer

    def close(self) -> None:
        """Closes the idle connections."""
        for idle in list(self._idle.values()):
            while idle:
                idle.pop().close()


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    content: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> tuple[int, bytes]:
    connection.timeout = timeout_s
    if connection.sock is not None:
        connection.sock.settimeout(timeout_s)
    with suppress(BrokenPipeError, ConnectionResetError):  # an answer may precede the end of a large body
        connection.request(method, target, content, headers)
    response = connection.getresponse()
    return response.status, response.read()


def _is_of_api(answer: bytes) -> bool:
    """Returns whether an error's body has the form of the API's errors."""
    try:
        body = json.loads(answer)
    except ValueError:
        return False
    return isinstance(body, dict) and "error" in body
