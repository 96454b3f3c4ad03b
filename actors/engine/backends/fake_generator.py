"""The parts of the fake engine: a generator that repeats one reply, a semaphore with priorities, a prefix cache, and an
embedding. One token is one byte of UTF-8, so that counts and texts can be predicted by hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections import deque

from raytide.actors.engine.text.stop_strings import StopScanner
from raytide.actors.engine.types import (
    FinishReason,
    GenChunk,
    GenRequest,
    SampleProgress,
    TokenLogprobs,
    check_progress,
)

VOCAB_SIZE = 256


class CannedGenerator:
    """Generates the tokens of a fixed reply, one at a time. The next token always has probability 1, so every log
    probability is 0.
    """

    def __init__(self, request: GenRequest, index: int, reply: bytes, room: int) -> None:
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._request, self._index, self._reply = request, index, reply
        self._limit = min(request.sampling.max_tokens or room, room)
        self._scanner = StopScanner.of(request.sampling)

    def next(self) -> GenChunk:
        return self._append(self._reply[len(self.tokens) % len(self._reply)])

    def replay(self, done: SampleProgress) -> None:
        """Appends the tokens of `done`, which another engine has already streamed, so that generation continues after
        them. Raises UsageError if the tokens complete the output, but `done` has no finish reason.
        """
        for token in done.token_ids:
            self._append(token)
        check_progress(self._request, self._index, is_over=self.finish_reason is not None)
        self.finish_reason = done.finish_reason

    def _append(self, token: int) -> GenChunk:
        params = self._request.sampling
        self.tokens.append(token)
        text = self._scanner.push(chr(token))
        is_stop = token in params.stop_token_ids and len(self.tokens) > params.min_tokens
        if self._scanner.stopped or is_stop:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._limit:
            self.finish_reason = "length"
        if self.finish_reason:
            text += self._scanner.flush()
        certain = None if params.logprobs is None else (self._certain(token),)
        return GenChunk(
            self._request.request_id,
            [token],
            text,
            self.finish_reason,
            index=self._index,
            logprobs=certain,
            stop=self._scanner.stopped_by,
        )

    def abort(self) -> GenChunk:
        self.finish_reason = "abort"
        return GenChunk(self._request.request_id, [], "", "abort", index=self._index)

    def _certain(self, token: int) -> TokenLogprobs:
        return TokenLogprobs(token, 0.0, 1, ((token, 0.0),) if self._request.sampling.logprobs else ())


class PrioritySemaphore:
    """A semaphore that serves waiters by priority, then by arrival."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._arrivals = 0
        self._waiting: list[tuple[int, int, asyncio.Future[bool]]] = []

    async def take(self, priority: int, turn: asyncio.Future[bool]) -> bool:
        """Waits for a place. The semaphore grants the place by setting the future `turn` to True. `take` then returns
        True. Another task can abort the wait by setting `turn` to False. `take` then returns False.
        """
        self._arrivals += 1
        heapq.heappush(self._waiting, (priority, self._arrivals, turn))
        self._call()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.result():  # called and gone at once
                self.leave()
            raise

    def leave(self) -> None:
        self._free += 1
        self._call()

    def _call(self) -> None:
        while self._free and self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._free -= 1
                turn.set_result(True)


class Prompts:
    """The fake engine's prefix cache: the latest prompts, each with its adapter and salt."""

    def __init__(self, count: int) -> None:
        self._served: deque[tuple[str | None, str, bytes]] = deque(maxlen=count)

    def add(self, lora: str | None, salt: str, prompt: bytes) -> None:
        self._served.append((lora, salt, prompt))

    def clear(self) -> None:
        self._served.clear()

    def cached(self, lora: str | None, salt: str, prompt: bytes) -> int:
        """Returns the length in tokens of the longest prefix that the prompt shares with a cached prompt. The prompt's
        last token never counts, because an engine always computes that token.
        """
        shared = [_shared(text, prompt) for *key, text in self._served if key == [lora, salt]]
        return max([0, *shared])


def _shared(one: bytes, other: bytes) -> int:
    limit = min(len(one), len(other) - 1)
    return next((i for i in range(limit) if one[i] != other[i]), limit)


def direction(text: bytes) -> list[float]:
    """Returns a fake embedding: a unit vector of eight numbers that depends on the text alone."""
    raw = [byte - 127.5 for byte in hashlib.blake2b(text, digest_size=8).digest()]
    length = sum(each * each for each in raw) ** 0.5
    return [each / length for each in raw]
