"""Sends the chunks of a step from the engine's own thread, so that a step does not wake the event loop.

If the event loop in the engine's process sent the chunks, each step would cost a quarter of a millisecond. Meanwhile
the engine's thread would wait for the Python interpreter. Some output still goes through the event loop: the first
chunk of a request, the last chunk of each sample, log probabilities, errors, and everything for a client that reads
slowly. The output of kept streams (kept_streams.py) always goes through the event loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raytide.actors.engine.backends.remote import wire
from raytide.actors.engine.backends.remote.wire import Kind
from raytide.actors.engine.types import GenChunk


class DirectSender(Protocol):
    """A connection on which any thread may send, not only the event loop's thread."""

    def send_now(self, packed: bytes) -> bool:
        """Sends a message and returns True. Returns False, without sending, if the message would have to wait.
        Thread-safe.
        """


@dataclass(slots=True, eq=False)
class DirectStream:
    """The output of one request. The engine's thread may send a chunk directly, but only after the event loop has
    written all chunks that were left to it. Thus no chunk overtakes another.
    """

    connection: DirectSender
    key: int
    is_begin: bool = True
    """True from a start of the request until its next chunk, which must go through the event loop."""
    sent: deque[GenChunk] = field(default_factory=deque)
    """Chunks that were sent directly and that the event loop has not yet counted."""
    given: int = 0
    """The number of chunks left to the event loop; the engine's thread counts them."""
    written: int = 0
    """The number of these chunks that the event loop has written; the loop counts them."""

    @property
    def is_ready(self) -> bool:
        return not self.is_begin and self.given == self.written


class DirectOutput:
    """The output streams of all connections, by request id. The event loop opens and closes the streams."""

    def __init__(self) -> None:
        self._streams: dict[str, DirectStream] = {}

    def open(self, request_id: str, stream: DirectStream) -> None:
        self._streams.setdefault(request_id, stream)  # an id in use is refused by the engine

    def close(self, request_id: str, stream: DirectStream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]

    def begin(self, request_id: str) -> None:
        """Makes the next chunk of a request go through the event loop. Call it only when no output of the request is
        pending in the engine.
        """
        if (stream := self._streams.get(request_id)) is not None:
            stream.is_begin = True

    def give(self, request_id: str) -> None:
        """Counts a chunk that never passed through the engine's thread and that the event loop will write. Call it only
        when no output of the request is pending in the engine.
        """
        if (stream := self._streams.get(request_id)) is not None:
            stream.given += 1

    def skip(self, request_id: str) -> None:
        """Counts a chunk that the event loop has received and will not write."""
        if (stream := self._streams.get(request_id)) is not None:
            stream.written += 1

    def sent(self, request_id: str) -> Iterator[GenChunk]:
        """Removes and yields the chunks of a request that were sent directly."""
        if (stream := self._streams.get(request_id)) is not None:
            while stream.sent:
                yield stream.sent.popleft()

    def take(self, outputs: Sequence[Any]) -> list[Any]:
        """Sends outputs of a step to the clients, except those that must go through the event loop. Each connection
        gets one message. Returns the outputs that were not sent. The event loop then sends them. Runs on the engine's
        thread.
        """
        rest: list[Any] = []
        direct: dict[DirectSender, list[tuple[DirectStream, GenChunk]]] = defaultdict(list)
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.is_ready and _is_plain(output):
                direct[stream.connection].append((stream, output))
            else:
                rest.append(output)
                if stream is not None:
                    stream.given += 1
                    stream.is_begin = False
        for connection, chunks in direct.items():
            packed = [[stream.key, wire.pack_chunk(chunk)] for stream, chunk in chunks]
            is_sent = connection.send_now(wire.pack([Kind.CHUNKS, packed, {}]))
            for stream, chunk in chunks:
                if is_sent:
                    stream.sent.append(chunk)
                else:
                    rest.append(chunk)
                    stream.given += 1
        return rest


def _is_plain(output: Any) -> bool:
    return (
        isinstance(output, GenChunk)
        and output.finish_reason is None
        and output.usage is None
        and output.logprobs is None
        and output.prompt_logprobs is None
    )
