"""A client of an engine in another process. It is used like an engine in this process."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from raytide.actors.engine.backends.remote import wire
from raytide.actors.engine.backends.remote.wire import Kind
from raytide.actors.engine.base import Engine, Prompt
from raytide.actors.engine.types import (
    PLAIN_PROMPT,
    EngineInfo,
    EngineStats,
    GenChunk,
    GenRequest,
    Message,
    PromptOptions,
)
from raytide.core.errors import EngineDeadError, RaytideError, from_json

_CONNECT_TIMEOUT_S = 5.0
_SILENCE_S = 10.0
"""A process that has sent no status for this many seconds counts as dead."""

_EMBEDDED_AT_ONCE = 128
"""The most inputs of one call: 2,048 vectors of a large model would be a longer message than a connection accepts."""

Item = GenChunk | RaytideError


class RemoteEngine(Engine):
    """A client of an engine in another process, over one connection. If the connection is lost, silent, or closed by
    `shutdown`, every open request ends with EngineDeadError and `on_lost` is called once. A `start` that fails calls
    `on_lost` too. Connections to the same model may share the map `token_texts`.
    """

    backend = "remote"

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        *,
        name: str = "",
        token_texts: dict[int, bytes] | None = None,
        on_status: Callable[[], None] = lambda: None,
        on_prefix: Callable[[bytes], None] = lambda prefix: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name or f"{host}:{port}"
        self._address, self._secret = (host, port), secret
        self._token_texts = {} if token_texts is None else token_texts
        self._on_status, self._on_prefix, self._on_lost = on_status, on_prefix, on_lost
        self._connection: _Connection | None = None

    async def start(self) -> EngineInfo:
        """Connects and returns the engine's description. Raises EngineDeadError when nothing answers at the address."""
        loop = asyncio.get_running_loop()
        connection = _Connection(self.name, self._token_texts, self._on_status, self._on_prefix, self._on_lost)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda: connection, *self._address)
                connection.send([Kind.OPEN, wire.VERSION, self._secret])
                info: EngineInfo = await connection.hello
            self._connection = connection
            return info
        except (OSError, TimeoutError, EngineDeadError) as error:
            raise EngineDeadError(f"engine {self.name} does not answer: {error!r}.", hint="Retry elsewhere.") from error
        finally:
            if self._connection is not connection:
                connection.close()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_lost

    @property
    def status(self) -> Status:
        """The latest status that the engine's process has sent."""
        return self._connected().status

    def generate(
        self,
        request: GenRequest,
        *,
        waited_s: float = 0.0,
        prefix: bytes = b"",
        prefill_at: Sequence[object] | None = None,
        new_tokens: int = 0,
    ) -> AsyncIterator[GenChunk]:
        """Streams the output of a request.

        `prefix` describes the prompt's prefix, which the engine will have in its cache after the prefill. The
        engine's process sends `prefix` to all other clients, whose `on_prefix` callbacks get it. `prefill_at` has
        the host, port, secret and name of another process, from which the engine fetches the prompt's KV.
        `new_tokens` is the number of prompt tokens that are probably not cached. The engine's status reports the sum
        of `new_tokens` over its requests.
        """
        return self._connected().generate(request, waited_s, prefix, prefill_at, new_tokens)

    async def prefill(self, request: GenRequest) -> tuple[list[GenChunk], bytes]:
        """Computes a request in the engine's process up to the first token, and ends the request there. Returns the
        chunks so far and the packed KV (see `KvHandle.to_bytes`). The KV is empty if the request is already complete.
        """
        parts = bytearray()
        packed = await self._connected().call("prefill", [wire.pack_request(request)], parts)
        return [wire.unpack_chunk(request.request_id, each) for each in packed], bytes(parts)

    async def tokenize(self, text: str, pair: str | None = None, *, special: bool = True) -> list[int]:
        return list(await self._call("tokenize", text, pair, special))

    async def pieces(self, tokens: Sequence[int]) -> list[str]:
        return list(await self._call("pieces", tokens))

    async def decode(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        return list(await self._call("decode", prompts))

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: PromptOptions = PLAIN_PROMPT,
    ) -> list[int]:
        others = () if options == PLAIN_PROMPT else (wire.pack_options(options),)
        turns = wire.pack_messages(messages)
        return list(await self._call("chat_prompt", turns, wire.pack_tools(tools), *others))

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token's text. The bytes are known only if a log probability of the token was received
        before. Returns b"" for any other token.
        """
        return self._token_texts.get(token, b"")

    async def abort(self, request_id: str) -> bool:
        return bool(await self._call("abort", request_id))

    async def stats(self) -> EngineStats:
        """Asks the engine's process for its present statistics. In contrast, `status` has the last statistics that the
        process sent by itself.
        """
        return wire.unpack_stats(await self._call("stats"))

    async def cached_prefix(self, token_ids: Sequence[int], *, lora: str | None = None, cache_salt: str = "") -> int:
        return int(await self._call("cached_prefix", token_ids, lora, cache_salt))

    async def holds(self, rejoin_key: str) -> bool:
        """Returns whether the engine's process has an answer for the request with this key. The process may still be
        computing the answer, or may have kept the finished answer.
        """
        return bool(await self._call("holds", rejoin_key))

    async def embed(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        return await self._vectors("embed", batch, lora)

    async def classify(self, batch: Sequence[Prompt], *, lora: str | None = None) -> list[list[float]]:
        return await self._vectors("classify", batch, lora)

    async def pause(self) -> None:
        await self._call("pause")

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        await self._call("sleep", level)

    async def wake(self) -> None:
        await self._call("wake")

    async def load_weights(self, source: str, version: str | None = None) -> str:
        return str(await self._call("load_weights", source, version))

    async def load_lora(self, name: str, path: str) -> None:
        await self._call("load_lora", name, path)

    async def unload_lora(self, name: str) -> None:
        await self._call("unload_lora", name)

    async def drain(self, timeout_s: float) -> bool:
        return bool(await self._call("drain", timeout_s))

    async def shutdown(self) -> None:
        """Closes the connection. The requests of this client end, but the engine keeps running."""
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> _Connection:
        if self._connection is None:
            raise EngineDeadError(f"engine {self.name} is not connected.", hint="Await start() first.")
        self._connection.check()
        return self._connection

    async def _vectors(self, method: str, batch: Sequence[Prompt], lora: str | None) -> list[list[float]]:
        vectors: list[list[float]] = []
        for start in range(0, len(batch), _EMBEDDED_AT_ONCE):
            vectors += await self._call(method, batch[start : start + _EMBEDDED_AT_ONCE], lora)
        return vectors

    async def _call(self, method: str, *arguments: object) -> Any:
        return await self._connected().call(method, arguments)


@dataclass(slots=True, eq=False)
class Status:
    """The latest report of an engine's process. `load` contains the engine's load and totals for the controller."""

    stats: EngineStats | None
    load: dict[str, float]
    problem: str | None
    is_draining: bool
    pending_tokens: int = 0
    at_s: float = field(default_factory=time.monotonic)


class _Connection(asyncio.Protocol):
    def __init__(
        self,
        name: str,
        token_texts: dict[int, bytes],
        on_status: Callable[[], None],
        on_prefix: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._name, self._token_texts = name, token_texts
        self._on_status, self._on_prefix, self._on_lost = on_status, on_prefix, on_lost
        self._loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[EngineInfo] = self._loop.create_future()
        self.status = Status(EngineStats(), {}, None, False)
        self.is_lost = False
        self._unpacker = wire.unpacker()
        self._keys = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._parts: dict[int, bytearray] = {}
        self._streams: dict[int, tuple[str, asyncio.Queue[Item]]] = {}
        self._transport: asyncio.Transport | None = None
        self._watching: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    def data_received(self, data: bytes) -> None:
        try:
            self._unpacker.feed(data)
            for message in self._unpacker:
                self._take(message)
        except Exception as error:  # the process is not ours, or broken
            self._lose(repr(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("its process ended" if exc is None else repr(exc))

    def check(self) -> None:
        if self.is_lost:
            raise self._dead("its connection is lost")

    def send(self, message: Sequence[object]) -> None:
        if self._transport is not None and not self.is_lost:
            self._transport.write(wire.pack(message))

    def close(self) -> None:
        self._lose("the connection was closed here")

    async def call(self, method: str, arguments: Sequence[object], parts: bytearray | None = None) -> Any:
        key = next(self._keys)
        done = self._calls[key] = self._loop.create_future()
        if parts is not None:
            self._parts[key] = parts
        try:
            self.send([Kind.CALL, key, method, list(arguments)])
            return await done
        finally:
            self._calls.pop(key, None)
            self._parts.pop(key, None)
            if done.cancelled():
                self.send([Kind.CLOSE, key])

    async def generate(
        self,
        request: GenRequest,
        waited_s: float,
        prefix: bytes,
        prefill_at: Sequence[object] | None,
        new_tokens: int,
    ) -> AsyncIterator[GenChunk]:
        self.check()
        key, stream = next(self._keys), asyncio.Queue[Item]()
        self._streams[key] = request.request_id, stream
        self.send([Kind.GENERATE, key, wire.pack_request(request), waited_s, prefix, prefill_at, new_tokens])
        ended = False
        try:
            while not ended:
                item = await stream.get()
                if not isinstance(item, GenChunk):
                    ended = True
                    raise item
                ended = item.usage is not None
                yield item
        finally:
            self._streams.pop(key, None)
            if not (ended or self.is_lost):  # the id stays in use until the engine has aborted the request
                closed = self._calls[key] = self._loop.create_future()
                closed.add_done_callback(lambda done: self._calls.pop(key, None) and done.exception())
                self.send([Kind.CLOSE, key])
                with suppress(RaytideError):
                    await asyncio.shield(closed)

    def _take(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == Kind.CHUNKS:
            self._token_texts.update(message[2])
            for key, packed in message[1]:
                if (found := self._streams.get(key)) is not None:
                    found[1].put_nowait(wire.unpack_chunk(found[0], packed))
        elif kind == Kind.STATUS:
            _, stats, *others = message
            self.status = Status(None if stats is None else wire.unpack_stats(stats), *others)
            self._on_status()
        elif kind == Kind.PART:
            if (parts := self._parts.get(message[1])) is not None:
                parts += message[2]
        elif kind == Kind.PREFIXES:
            for prefix in message[1]:
                self._on_prefix(prefix)
        elif kind == Kind.RESULT:
            if (done := self._calls.get(message[1])) is not None and not done.done():
                done.set_result(message[2])
        elif kind == Kind.ERROR:
            self._fail(message[1], from_json(message[2]))
        elif kind == Kind.HELLO:
            if not self.hello.done():
                self.hello.set_result(wire.unpack_info(message[1]))
        else:
            raise ValueError(f"message of kind {kind!r}")

    def _fail(self, key: int, error: RaytideError) -> None:
        if (found := self._streams.get(key)) is not None:
            found[1].put_nowait(error)
        elif (done := self._calls.get(key)) is not None and not done.done():
            done.set_exception(error)

    def _watch(self, was_silent: bool = False) -> None:
        """Treats a connection that has been silent for too long as lost: the process hangs, or its machine is gone.
        Schedules the next check. Two checks in a row must find the silence: if this process has stood still itself,
        the first one comes before what has arrived meanwhile is read.
        """
        if self.is_lost:
            return
        is_silent = time.monotonic() - self.status.at_s > _SILENCE_S
        if is_silent and was_silent:
            self._lose("it has been silent")
            return
        self._watching = self._loop.call_later(_SILENCE_S / 10, self._watch, is_silent)

    def _lose(self, why: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if self._watching is not None:
            self._watching.cancel()
        if self._transport is not None:
            self._transport.abort()
        error = self._dead(why)
        if not self.hello.done():
            self.hello.set_exception(error)
            self.hello.exception()  # it may have no reader
        for key in [*self._calls, *self._streams]:
            self._fail(key, self._dead(why))
        self._on_lost()

    def _dead(self, why: str) -> EngineDeadError:
        return EngineDeadError(f"engine {self._name}: {why}.", hint="Retry elsewhere.")
