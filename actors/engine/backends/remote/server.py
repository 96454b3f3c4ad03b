"""Serves an engine to other processes: each client process has one connection, which carries many requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, cast

from raytide.actors.engine.backends.remote import wire
from raytide.actors.engine.backends.remote.direct_output import DirectOutput, DirectStream
from raytide.actors.engine.backends.remote.fair_admission import FairAdmission
from raytide.actors.engine.backends.remote.handover import HandoverEngine, PrefillPeer, prefill
from raytide.actors.engine.backends.remote.kept_streams import KeptStreams
from raytide.actors.engine.backends.remote.load_counters import LoadCounters
from raytide.actors.engine.backends.remote.wire import Kind
from raytide.actors.engine.base import Engine
from raytide.actors.engine.types import EngineInfo, EngineStats, GenChunk, as_request_error
from raytide.core.errors import RaytideError, UsageError

_log = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 5.0
_MAX_PREFIXES = 1024
"""The most prefixes in one status to a client; the oldest are left out."""
_PART_BYTES = 1 << 20
_MAX_UNSENT_BYTES = 64 << 20
"""A client that leaves more bytes than this unread loses its connection, and its requests end."""


_CALLS: dict[str, Callable[..., Awaitable[Any]]] = {
    "tokenize": lambda engine, text, pair, special: engine.tokenize(text, pair, special=special),
    "pieces": lambda engine, tokens: engine.pieces(tokens),
    "decode": lambda engine, prompts: engine.decode(prompts),
    "chat_prompt": lambda engine, turns, tools, options="{}": engine.chat_prompt(
        wire.unpack_messages(turns), wire.unpack_tools(tools), wire.unpack_options(options)
    ),
    "cached_prefix": lambda engine, ids, lora, salt: engine.cached_prefix(ids, lora=lora, cache_salt=salt),
    "embed": lambda engine, batch, lora: engine.embed(batch, lora=lora),
    "classify": lambda engine, batch, lora: engine.classify(batch, lora=lora),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine, level: engine.sleep(level),
    "wake": lambda engine: engine.wake(),
    "load_weights": lambda engine, source, version: engine.load_weights(source, version),
    "load_lora": lambda engine, name, path: engine.load_lora(name, path),
}


class EngineServer:
    """Serves a started engine to clients that know `secret`. The function `problem` returns why the engine is broken,
    or None if it works.
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        secret: str,
        *,
        problem: Callable[[], Awaitable[str | None]],
        slo_ttft_s: float | None = None,
    ) -> None:
        self.engine, self.info = engine, info
        self.counters = LoadCounters(slo_ttft_s)
        self.direct = DirectOutput()
        engine.tap(self.direct.take)
        self.handover = HandoverEngine(engine, self.direct)
        self.admission = FairAdmission(self.handover, info, self.direct, engine.can_resume, slo_ttft_s=slo_ttft_s)
        self.kept = KeptStreams(self.admission.generate)
        self.is_draining = False
        self._secret = secret.encode()
        self._problem = problem
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._has_news = asyncio.Event()

    async def listen(self, host: str) -> int:
        """Starts to accept connections and returns the port."""
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), host, 0)
        self._reporting = asyncio.create_task(self._report())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def drain(self, timeout_s: float) -> bool:
        """Tells clients to send no more requests, and waits for the running requests. Returns whether all of them ended
        in time.
        """
        self.is_draining = True
        await self._report_once()
        deadline_s = time.monotonic() + timeout_s
        await self.admission.drain(timeout_s)
        return await self.engine.drain(max(0.0, deadline_s - time.monotonic()))

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        await self.kept.close()
        await self.handover.close()

    def is_known(self, secret: object) -> bool:
        return isinstance(secret, str) and hmac.compare_digest(secret.encode(errors="replace"), self._secret)

    def accepted(self, connection: _Connection) -> None:
        self._connections.add(connection)

    def closed(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def add_news(self) -> None:
        """Sends the clients a status soon after a new request, so that they do not all choose this replica."""
        if len(self._connections) > 1:
            self._has_news.set()

    def add_prefix(self, sender: _Connection, prefix: bytes) -> None:
        """Adds a cached prefix to the next status for every client except the sender."""
        for connection in self._connections:
            if connection.is_open and connection is not sender:
                connection.prefixes.append(prefix)

    async def status(self) -> list[Any]:
        problem = await self._problem()
        try:
            stats = await self.stats()
        except RaytideError as error:
            return [Kind.STATUS, None, {}, problem or str(error), self.is_draining, 0]
        load = self.counters.load(stats)
        return [Kind.STATUS, wire.pack_stats(stats), load, problem, self.is_draining, self.counters.pending_tokens]

    async def stats(self) -> EngineStats:
        """Returns the engine's statistics. Requests that wait for admission count as waiting."""
        stats = await self.engine.stats()
        return replace(stats, waiting=stats.waiting + self.admission.waiting)

    async def _report(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), wire.STATUS_PERIOD_S)
            self._has_news.clear()
            self.admission.dispatch()
            await self._report_once()
            await asyncio.sleep(wire.NEWS_PERIOD_S)

    async def _report_once(self) -> None:
        packed = wire.pack(await self.status())
        for connection in [each for each in self._connections if each.is_open]:
            if connection.prefixes:
                connection.write(wire.pack([Kind.PREFIXES, list(connection.prefixes)]))
                connection.prefixes.clear()
            connection.write(packed)


class _Connection(asyncio.Protocol):
    """The connection of one client process."""

    def __init__(self, server: EngineServer) -> None:
        self.prefixes: deque[bytes] = deque(maxlen=_MAX_PREFIXES)
        """The prefixes that other clients have sent since the last status."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._unpacker = wire.unpacker()
        self.is_open = False
        """True from when the client has shown that it knows the secret until the connection is lost."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._chunks: list[list[Any]] = []
        self._unwritten: list[DirectStream] = []
        """The streams of the chunks in `_chunks`."""
        self._new_tokens: dict[int, bytes] = {}
        self._known_tokens: set[int] = set()
        self._transport: asyncio.Transport
        self._opening: asyncio.TimerHandle
        self._writing = threading.Lock()
        """A writer holds this lock. It protects the three fields that follow."""
        self._socket: socket.socket | None = None
        self._is_waiting = False
        """True while the transport holds bytes that the client has not read."""
        self._cut_off = b""
        """The unsent end of a message whose first bytes another thread has sent."""
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        self._transport.set_write_buffer_limits(0)
        sending = transport.get_extra_info("socket")
        sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sending.dup()
        self._opening = self._loop.call_later(_OPEN_TIMEOUT_S, self._transport.abort)
        self._server.accepted(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                self._take(message)
        except Exception as error:  # not our protocol, or a bug in a client
            _log.warning("a connection to the engine is closed: %r", error)
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._opening.cancel()
        self._server.closed(self)
        with self._writing:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
        for task in self._tasks.values():
            task.cancel()

    def pause_writing(self) -> None:
        self._is_waiting = True  # the transport calls this while `write` holds the lock
        self._is_writable.clear()

    def resume_writing(self) -> None:
        with self._writing:
            self._is_waiting = False
        self._is_writable.set()

    def write(self, packed: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            _log.warning("a client of the engine reads nothing; its connection is closed")
            self._transport.abort()
            return
        with self._writing:
            cut_off, self._cut_off = self._cut_off, b""
            self._transport.write(cut_off + packed)

    def send_now(self, packed: bytes) -> bool:
        """Sends a message from a thread other than the event loop's. Returns False, without sending, while earlier
        bytes wait.
        """
        with self._writing:
            if self._socket is None or self._is_waiting or self._cut_off:
                return False
            try:
                sent = self._socket.send(packed, socket.MSG_DONTWAIT)
            except OSError:  # its buffer is full, or the connection is lost
                return False
            if sent < len(packed):
                self._cut_off = packed[sent:]
        if sent < len(packed):
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.write, b"")
        return True

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _take(self, message: list[Any]) -> None:
        kind = message[0]
        if not self.is_open:
            self._open(message)
        elif kind == Kind.GENERATE:
            self._start(message[1], self._generate(*message[1:]))
        elif kind == Kind.CALL:
            self._start(message[1], self._call(*message[1:]))
        elif kind == Kind.CLOSE:
            self._cancel(message[1])
        else:
            raise ValueError(f"message of kind {kind!r}")

    def _open(self, message: list[Any]) -> None:
        kind, version, secret = message
        if kind != Kind.OPEN or version != wire.VERSION or not self._server.is_known(secret):
            raise ValueError("the first message does not open the connection")
        self._opening.cancel()
        self.is_open = True
        self.write(wire.pack([Kind.HELLO, wire.pack_info(self._server.info)]))
        self._start(-1, self._first_status())

    async def _first_status(self) -> None:
        self.write(wire.pack(await self._server.status()))

    def _cancel(self, key: int) -> None:
        """Ends a call or a generation, and sends the client a RESULT once it has left the engine."""
        if (task := self._tasks.get(key)) is None:
            self.write(wire.pack([Kind.RESULT, key, None]))
        else:
            task.add_done_callback(lambda _: self.write(wire.pack([Kind.RESULT, key, None])))
            task.cancel()

    def _start(self, key: int, work: Any) -> None:
        task = self._tasks[key] = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _call(self, key: int, method: str, arguments: Iterable[Any]) -> None:
        try:
            if method == "drain":
                result: object = await self._server.drain(*arguments)
            elif method == "abort":
                result = await self._server.admission.abort(*arguments)
            elif method == "unload_lora":
                self._server.admission.check_unused(*arguments)
                await self._server.engine.unload_lora(*arguments)
                result = None
            elif method == "prefill":
                result = await self._prefill(key, *arguments)
            elif method == "stats":
                result = wire.pack_stats(await self._server.stats())
            elif method == "holds":
                result = self._server.kept.holds(*arguments)
            elif method in _CALLS:
                result = await _CALLS[method](self._server.engine, *arguments)
            else:
                raise UsageError(f"the engine's process knows no call {method!r}.")
            self.write(wire.pack([Kind.RESULT, key, result]))
        except Exception as error:
            self.write(wire.pack([Kind.ERROR, key, wire.pack_error(error)]))

    async def _prefill(self, key: int, packed: Mapping[str, Any]) -> list[Any]:
        """Computes a prompt for another engine's process: sends it the KV, and returns the packed chunks so far."""
        request = wire.read_request(packed)
        with self._server.counters.track(0.0) as tracked:
            chunks, handle = await prefill(self._server.engine, self._server.admission, request)
            tracked.first_chunk()
        if handle is not None:
            data = memoryview(await asyncio.to_thread(handle.to_bytes))
            for start in range(0, len(data), _PART_BYTES):
                self.write(wire.pack([Kind.PART, key, data[start : start + _PART_BYTES]]))
                await self._is_writable.wait()
        return [wire.pack_chunk(chunk) for chunk in chunks]

    async def _generate(
        self,
        key: int,
        packed: Mapping[str, Any],
        waited_s: float,
        prefix: bytes,
        prefill_at: tuple[str, int, str, str] | None,
        new_tokens: int = 0,
    ) -> None:
        request, stream = None, DirectStream(self, key)
        if prefix:
            self._server.add_prefix(self, prefix)
        try:
            request = wire.read_request(packed)
            if request.sampling.prompt_logprobs is not None and not isinstance(request.prompt, str):
                self._name(set(request.prompt[:1]))  # nothing scores it, but an echo shows it
            if request.rejoin_key and not request.resume:
                source = self._server.kept.generate(request, waited_s, lambda: not self.is_open)
            else:
                await self._server.kept.stop(request.rejoin_key)
                self._server.direct.open(request.request_id, stream)
                source = self._server.admission.generate(request, waited_s)
            with self._server.counters.track(waited_s, new_tokens) as tracked:
                self._server.add_news()
                if prefill_at is not None:
                    self._server.handover.assign(request.request_id, PrefillPeer(*prefill_at))
                async with aclosing(source) as chunks:
                    async for chunk in chunks:
                        tracked.first_chunk()
                        self._add(stream, chunk)
        except BaseException as raised:
            error = as_request_error(raised)
            self._flush()
            self.write(wire.pack([Kind.ERROR, key, wire.pack_error(error)]))
        finally:
            if request is not None:
                self._server.direct.close(request.request_id, stream)
                if prefill_at is not None:
                    self._server.handover.forget(request.request_id)

    def _add(self, stream: DirectStream, chunk: GenChunk) -> None:
        """Adds a chunk to the message of this step, which is sent once all of the step's chunks are in it."""
        if not self._chunks:
            self._loop.call_soon(self._flush)
        self._chunks.append([stream.key, wire.pack_chunk(chunk)])
        self._unwritten.append(stream)
        if scores := wire.scores_of(chunk):
            self._name({token for each in scores for token in (each.token_id, *(token for token, _ in each.top))})

    def _name(self, tokens: set[int]) -> None:
        for token in tokens - self._known_tokens:
            self._new_tokens[token] = self._server.engine.token_bytes(token)
        self._known_tokens |= tokens

    def _flush(self) -> None:
        if self._chunks:
            packed = wire.pack([Kind.CHUNKS, self._chunks, self._new_tokens])
            streams, self._unwritten = self._unwritten, []
            self._chunks, self._new_tokens = [], {}
            self.write(packed)
            for stream in streams:
                stream.written += 1
