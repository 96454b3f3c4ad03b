"""The HTTP/1.1 protocol of the gateway, with limits on the size and the arrival time of a request's head.

It adds the limits to uvicorn's httptools protocol, which has none. Without limits, 64 MiB of headers took 900 MiB of
memory. uvicorn's h11 protocol has limits, but is slower with streams.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from raytide.actors.serving.http.unread_answers import ReadersLimit

HEAD_BYTES = 1 << 16
"""The most bytes of a request's head (request line and headers), and between two pieces of a body. A connection with
more ends.
"""
HEAD_S = 10.0
"""The time within which a request's head must arrive, in seconds."""


class _UntilClose(int):
    """The content length of a body that ends when its connection is closed."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UntilClose:
        return self

    __hash__ = int.__hash__


class BoundedHttpTools(ReadersLimit, HttpToolsProtocol):
    _late: asyncio.TimerHandle | None = None
    _is_in_head = True
    _idle_bytes = 0
    """Bytes since the last head or piece of a body. The parser keeps them, or what it makes of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(HEAD_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._is_in_head and self._late is None:
            self._late = self.loop.call_later(HEAD_S, self.transport.abort)
        self._idle_bytes += len(data)
        super().data_received(data)
        if self._idle_bytes > HEAD_BYTES:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._is_in_head, self._idle_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head, self._idle_bytes = True, 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":  # uvicorn would send chunks, which HTTP/1.0 does not have
            cycle.chunked_encoding, cycle.expected_content_length = False, _UntilClose()
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
