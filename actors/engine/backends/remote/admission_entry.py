"""A request in the fair admission queue: its parameters, its progress, and whether it runs."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from raytide.actors.engine.base import StreamProgress
from raytide.actors.engine.types import GenRequest


@dataclass(eq=False, slots=True)
class AdmissionEntry:
    """A request that waits for admission or runs in the engine, with its progress."""

    request: GenRequest
    progress: StreamProgress
    places: int
    """The number of sequences that the request runs in the engine."""
    priority: int
    turn: asyncio.Future[None]
    due_s: float = math.inf
    """The time by which the first token is promised, in seconds on the event loop's clock."""
    tokens: int = 0
    """The number of tokens in its answer so far."""
    is_running: bool = False
    started: int = 0
    """The number of the request's last start; the starts of all requests are numbered in order."""
    started_s: float = 0.0
    is_answered: bool = False
    """True once the engine has sent a chunk since the last start, so that the request no longer waits there."""
    is_preempted: bool = False
    """True if the engine has preempted the request since its last start."""
    gave_way: bool = False
    """True if the engine has ever preempted the request."""
    is_aborted: bool = False
    cached_tokens: int | None = None
    """The number of prompt tokens that were cached at the start that gave the first token. It is None until the request
    has been preempted after its first token.
    """

    @property
    def kv_tokens(self) -> int:
        return len(self.request.prompt) + 1 + self.tokens

    def remainder(self) -> GenRequest:
        """Returns a request for the rest of the answer. Before the first token, the rest is the whole answer."""
        return replace(self.progress.resumed(), gave_way=self.gave_way)

    @property
    def is_preemptible(self) -> bool:
        """True if the request runs and can be interrupted without loss. False for a request with prompt log
        probabilities, or with more samples than the client gets. After an interruption, such results would have to be
        computed or sent again.
        """
        params = self.request.sampling
        return self.is_running and params.num_samples == params.n and params.prompt_logprobs is None
