"""Limits the time for which a peer may leave unread what was written to its connection."""

from __future__ import annotations

import asyncio

UNREAD_S = 30.0
"""The time within which a peer must read LEAST_BYTES, or all that was written to it, in seconds."""
LEAST_BYTES = 1 << 20


class ReadersLimit(asyncio.Protocol):
    """A mixin for uvicorn's protocols. It ends the connection of a client that does not read its answer.

    uvicorn writes an answer's last message without waiting. Without this limit, an unread answer would stay in memory
    as long as the client's machine lives, even after the keep-alive timeout, because closing a connection waits for
    unread bytes. Put the mixin before uvicorn's protocol.
    """

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _unread_bytes = 0
    _late_reader: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_reader(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._late_reader = self.loop.call_later(UNREAD_S, self._check_reader)

    def _check_reader(self) -> None:
        if self._unread_bytes - self.transport.get_write_buffer_size() < LEAST_BYTES:
            self._stop_waiting()
            self.transport.abort()
        else:
            self._wait_for_reader()

    def _stop_waiting(self) -> None:
        if self._late_reader is not None:
            self._late_reader.cancel()
            self._late_reader = None
