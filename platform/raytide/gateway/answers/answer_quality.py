"""Measures the log probability that a model gives to its own answers, for a sample of the requests."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.gateway.answers.shared_answers import Generate

SHARE = 0.01
"""The share of requests that are measured. Their log probabilities cost the engine one softmax for each token."""
_KEPT, _KEPT_S = 256, 3600.0


class AnswerQuality:
    """The mean log probability of the last measured answers, in nats a token. It covers at most 256 answers of the last
    hour."""

    def __init__(self, share: float = SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._answers: deque[tuple[float, float, int]] = deque(maxlen=_KEPT)
        """The measured answers, each with its time, the sum of its log probabilities, and its number of tokens."""

    def measured(self, generate: Generate, is_able: Callable[[], bool]) -> Generate:
        """Wraps `generate` so that a random share of the answers is measured. Answers are measured only while
        `is_able()` is true, which means that the engine can report log probabilities."""

        def choose(request: GenRequest) -> AsyncIterator[GenChunk]:
            is_chosen = random.random() < self._share  # no secret  # nosec B311
            return self._measure(generate, request) if is_chosen and is_able() else generate(request)

        return choose

    async def _measure(self, generate: Generate, request: GenRequest) -> AsyncIterator[GenChunk]:
        """Yields the answer's chunks and measures them. Log probabilities that the request did not ask for are
        removed."""
        is_asked = request.sampling.logprobs is not None
        if not is_asked:
            request = replace(request, sampling=replace(request.sampling, logprobs=0))
        total, tokens = 0.0, 0
        async with aclosing(generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                total += sum(each.logprob for each in chunk.logprobs or ())
                tokens += len(chunk.logprobs or ())
                yield chunk if is_asked else replace(chunk, logprobs=None)
        if tokens:
            self._answers.append((self._clock(), total, tokens))

    @property
    def mean_logprob(self) -> float | None:
        """The mean log probability over the last measured answers, in nats a token. None if no answer was measured in
        the last hour."""
        since_s = self._clock() - _KEPT_S
        recent = [(total, tokens) for at_s, total, tokens in self._answers if at_s >= since_s]
        tokens = sum(count for _, count in recent)
        return sum(total for total, _ in recent) / tokens if tokens else None
