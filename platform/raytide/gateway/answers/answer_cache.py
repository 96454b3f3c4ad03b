"""Keeps exact answers for a while, where an endpoint asks for it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from raytide.actors.engine.types import GenChunk
from raytide.actors.serving.openai_api.respond import KEPT
from raytide.core.objects.endpoint import AnswerCachePolicy

MAX_TOKENS = 4096
"""Longer answers are not kept: they would arrive faster than a client reads."""
_TOKEN_BYTES, _CHUNK_BYTES = 40, 1000


class AnswerCache:
    """The answers of one endpoint, the least recently used first. A policy of None keeps nothing."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self._now_s = now_s
        self._policy: AnswerCachePolicy | None = None
        self._answers: OrderedDict[bytes, tuple[float, int, list[GenChunk]]] = OrderedDict()

    def set_policy(self, policy: AnswerCachePolicy | None) -> None:
        self._policy = policy
        self._evict()

    def find(self, key: bytes) -> list[GenChunk] | None:
        """Returns the chunks of an answer, one for each sample; None for one that is not kept or has expired."""
        if self._policy is None or (found := self._answers.get(key)) is None:
            return None
        at_s, _, chunks = found
        if self._now_s() - at_s >= self._policy.ttl_s:
            self._drop(key)
            return None
        self._answers.move_to_end(key)
        return chunks

    def add(self, key: bytes, chunks: Sequence[GenChunk]) -> None:
        """Keeps a complete answer."""
        if self._policy is None or key in self._answers or sum(len(chunk.token_ids) for chunk in chunks) > MAX_TOKENS:
            return
        joined = _joined(chunks)
        size = sum(_CHUNK_BYTES + _TOKEN_BYTES * len(each.token_ids) + 4 * len(each.text) for each in joined)
        self._answers[key] = self._now_s(), size, joined
        self.num_bytes += size
        self._evict()

    def _evict(self) -> None:
        most = 0 if self._policy is None else self._policy.max_mb << 20
        while self.num_bytes > most:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: bytes) -> None:
        _, size, _ = self._answers.pop(key)
        self.num_bytes -= size


def _joined(chunks: Sequence[GenChunk]) -> list[GenChunk]:
    """Returns one chunk for each sample; the last one has the usage."""
    samples: dict[int, list[GenChunk]] = {}
    for chunk in chunks:
        samples.setdefault(chunk.index, []).append(chunk)
    joined = [
        replace(
            each[-1],
            token_ids=[token for chunk in each for token in chunk.token_ids],
            text="".join(chunk.text for chunk in each),
            replica=KEPT,
        )
        for each in samples.values()
    ]
    return sorted(joined, key=lambda chunk: chunk.usage is not None)
