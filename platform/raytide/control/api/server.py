"""The API's HTTP server. It limits connections that send nothing, never finish the head of a request or do not read
their answer; `gate` limits bodies."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import OrderedDict
from contextlib import suppress
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from raytide.actors.serving.http.unread_answers import ReadersLimit

HEAD_BYTES = 2**15
"""The largest head (request line and headers) of a request."""
HEAD_S = 10.0
"""The time within which a request's head must arrive, in seconds."""
MOST_HEADLESS = 512
"""The most connections without the head of their first request; above it, the oldest is closed."""
MOST_CONNECTIONS = 8192
"""The most connections, above which requests get 503. Every driver that waits for its lease holds one."""
_END_S = 3.0


class BoundedProtocol(ReadersLimit, H11Protocol):
    """HTTP/1.1 with limits on request heads. h11 limits their size, and this class limits the time until a head is
    complete.
    """

    _headless: ClassVar[OrderedDict[BoundedProtocol, None]] = OrderedDict()
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _find_dead_peers(transport.get_extra_info("socket"))
        self._headless[self] = None
        self._late = self.loop.call_later(HEAD_S, self._close)
        if len(self._headless) > MOST_HEADLESS:
            next(iter(self._headless))._close()

    def data_received(self, data: bytes) -> None:
        if self._late is None and not self._is_answering:
            self._late = self.loop.call_later(HEAD_S, self._close)
        super().data_received(data)
        if self._is_answering:
            self._has_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_head()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_head(self) -> None:
        self._headless.pop(self, None)
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._has_head()
        self.transport.abort()


def _find_dead_peers(connection: socket.socket) -> None:
    """Makes the kernel probe silent clients, because nothing else would close the connection of a lost machine."""
    with suppress(OSError, AttributeError):  # a system without these options finds out when the poll ends
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)


def server(app: ASGIApp, host: str, port: int) -> uvicorn.Server:
    """Returns the API's server without starting it."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=BoundedProtocol,
            ws="none",
            log_level="warning",
            h11_max_incomplete_event_size=HEAD_BYTES,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=int(_END_S),
            server_header=False,
            access_log=False,
        )
    )


def allow_connections() -> None:
    """Increases the soft limit on open files to the number that all connections need. If the hard limit is lower,
    increases the soft limit to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MOST_CONNECTIONS if hard == resource.RLIM_INFINITY else min(2 * MOST_CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
