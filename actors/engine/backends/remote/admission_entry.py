"""One request on its way through the fair admission: what it asks, how far it is, and whether it runs."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace

from raytide.actors.engine.base import StreamProgress
from raytide.actors.engine.types import GenRequest


@dataclass(eq=False, slots=True)
class AdmissionEntry:
    """A request on its way through."""

    request: GenRequest
    progress: StreamProgress
    places: int
    """The sequences that it takes in the engine."""
    priority: int
    turn: asyncio.Future[None]
    due_s: float = math.inf
    """The promised time of its first token, on the event loop's clock."""
    tokens: int = 0
    """The tokens of its answer so far."""
    is_running: bool = False
    started: int = 0
    """The number of its last start, in the order of all."""
    started_s: float = 0.0
    is_answered: bool = False
    """True once the engine has sent something since the last start: it waits there no more."""
    is_preempted: bool = False
    """True once the engine has ended it for others, since its last start."""
    gave_way: bool = False
    """True once the engine has ended it for others, ever."""
    is_aborted: bool = False
    cached_tokens: int | None = None
    """The part of the prompt that was cached at the first start, if it was preempted since."""

    @property
    def kv_tokens(self) -> int:
        return len(self.request.prompt) + 1 + self.tokens

    def remainder(self) -> GenRequest:
        """Returns the request for the rest of its answer."""
        return replace(self.progress.resumed(), gave_way=self.gave_way)

    @property
    def is_preemptible(self) -> bool:
        """False where what was computed would have to be computed, or sent, again."""
        params = self.request.sampling
        return self.is_running and params.num_samples == params.n and params.prompt_logprobs is None
