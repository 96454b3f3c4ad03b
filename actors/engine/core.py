"""The engine's shared nouns: what a request asks, what a sequence is, what one step does, what comes back.

No torch in here: the scheduler, the router and the tests use these without a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

from raytide.core.errors import UsageError

__all__ = [
    "Chunk",
    "Completion",
    "EngineInfo",
    "EngineStats",
    "Feature",
    "FinishReason",
    "GenChunk",
    "GenRequest",
    "Message",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "StepPlan",
    "Timing",
    "Usage",
]

FinishReason = Literal["stop", "length", "abort", "error"]
Feature = Literal["penalties", "prefix_cache", "sampling", "stop_strings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose each next token, and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch these filters off. With a `seed` the tokens
    depend on the prompt, the parameters and the seed alone, whatever else is in the batch. `max_tokens` None means
    until the context is full. Penalties follow OpenAI's definition (presence, frequency: over the output) and CTRL's
    (repetition: over prompt and output, arXiv 1909.05858).
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Items[str] = ()
    stop_token_ids: Items[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1, or None")
        _require(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or more")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "from 0 to 1")
        _require(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        _require(all(isinstance(s, str) and s for s in stop), "stop", stop, "non-empty strings")
        _require(0.0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "from -2 to 2")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_filters(self) -> bool:
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"sampling parameter {name} is {value!r}.", hint=f"{name} must be {allowed}.")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRequest:
    """One generation. `prompt` is text or token ids; `request_id` is unique among the requests in flight."""

    request_id: str
    prompt: str | Items[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a finished request's time went: waiting for a place, until its first token from there, and after it."""

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class GenChunk:
    """What one step added to one request. Only the last chunk has `finish_reason`, `usage` and `timing`.

    `text` can lag behind `token_ids` (half a character, or the possible start of a stop string, is held back).
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(slots=True)
class Completion:
    """One answer of the offline `LLM`. `error` says why when `finish_reason` is "error"."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The offline `LLM`'s answers to one prompt. `prompt` is None when token ids were given."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    usage: Usage


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself once it has started. `features` decides which conformance tests apply."""

    model: str
    backend: str
    max_model_len: int
    block_size: int
    num_blocks: int
    features: frozenset[Feature]


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, except `running`, `waiting` and `free_blocks`, which are now.

    `steps` is the progress counter for health checks: with work in the engine it must move. `free_blocks` counts cached
    but unreferenced blocks too. `step_ms` is a moving average.
    """

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    num_blocks: int = 0
    steps: int = 0
    step_ms: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. `tokens` is the prompt followed by the output; KV exists for the first
    `num_computed`.
    """

    seq_id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    max_len: int  # finished with "length" when `tokens` reaches this
    stop_token_ids: frozenset[int]  # with the model's end tokens, unless ignore_eos
    seed: int
    arrival: int = -1  # set by the scheduler; the order of service
    num_computed: int = 0
    num_cached: int = 0
    preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions start to start + length of one sequence, computed in one step."""

    seq: Sequence
    start: int
    length: int

    @property
    def samples(self) -> bool:
        """Whether the step brings the sequence up to date, so that it yields a next token."""
        return self.start + self.length == len(self.seq.tokens)


@dataclass(slots=True)
class StepPlan:
    """One step of the model: which tokens of which sequences, and who lost its blocks to make room."""

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)
