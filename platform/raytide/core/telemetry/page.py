"""The metrics page of a process: a small HTTP server in the process's event loop. Only Prometheus and raytide's monitor
read it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import parse_qs, urlsplit

from raytide.core.telemetry.metrics import CONTENT_TYPE, OPENMETRICS_TYPE, Sample, render

Query = dict[str, list[str]]
Page = Callable[[Query], Awaitable[Iterable[Sample]]]
"""Returns the page's samples for a query."""

_PATH = "/metrics"
_TIMEOUT_S = 10.0
"""The seconds within which a request must have arrived and its answer must be read."""
_MOST_HEAD_BYTES = 8192
_MOST_CONNECTIONS = 32


class MetricsPage:
    """Serves `GET /metrics` on a separate port. Nothing on the page is secret, so no key is needed."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._connections = 0
        self._server: asyncio.Server | None = None

    async def start(self, host: str) -> str:
        """Starts the server on a port that the system chooses, and returns the page's `host:port`."""
        self._server = await asyncio.start_server(self._serve, host, 0, limit=_MOST_HEAD_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request and closes the connection."""
        self._connections += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                if self._connections <= _MOST_CONNECTIONS:
                    writer.write(await self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # the client left, or is none of ours
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        try:
            url = urlsplit(rest.partition(" ")[0])
        except ValueError:
            return _response("400 Bad Request", b"")
        if url.path != _PATH:
            return _response("404 Not Found", b"")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"")
        accepted = (line[7:] for line in head.lower().split(b"\r\n") if line.startswith(b"accept:"))
        is_openmetrics = any(b"application/openmetrics-text" in types for types in accepted)
        body = render(await self._page(parse_qs(url.query)), openmetrics=is_openmetrics)
        type = OPENMETRICS_TYPE if is_openmetrics else CONTENT_TYPE
        return _response("200 OK", body, type, is_head=method == "HEAD")


def _response(status: str, body: bytes, type: str = CONTENT_TYPE, *, is_head: bool = False) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {type}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + (b"" if is_head else body)
