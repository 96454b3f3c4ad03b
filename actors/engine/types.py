"""The engine's shared nouns: what a request asks and what comes back.

No torch in here: the scheduler, the router and the tests use these without a device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

from raytide.actors.engine.sampling_params import SamplingParams

__all__ = [
    "CompletionOutput",
    "EngineInfo",
    "EngineState",
    "EngineStats",
    "Feature",
    "FinishReason",
    "GenChunk",
    "GenRequest",
    "Message",
    "RequestOutput",
    "Timing",
    "TokenLogprobs",
    "TokenUsage",
    "as_request_error",
]

EngineState = Literal["serving", "paused", "asleep"]
FinishReason = Literal["stop", "length", "abort", "error"]
Feature = Literal[
    "bad_words",
    "best_of",
    "deterministic",
    "embeddings",
    "kv_transfer",
    "logit_bias",
    "logprobs",
    "lora",
    "min_tokens",
    "n",
    "pause",
    "penalties",
    "prefix_cache",
    "priority",
    "prompt_logprobs",
    "sampling",
    "sleep",
    "stop_strings",
    "structured",
    "weights_swap",
]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRequest:
    """One generation. `prompt` is text or token ids; `request_id` is unique among the requests in flight.

    `priority`: lower goes first, as in vLLM. `deadline_s`: the first token is wanted this soon after arrival; the
    policy "deadline" serves by it. `lora` names a loaded adapter. Requests with different `cache_salt` share no prefix.
    """

    request_id: str
    prompt: str | Items[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline_s: float | None = None
    lora: str | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenUsage:
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
class TokenLogprobs:
    """A token's log probability under the model's own distribution, its rank there (1 is the most likely), and the
    most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenChunk:
    """What one step added to one of a request's samples. The last chunk of each sample has `finish_reason`; the last
    one of the request also `usage` (of all samples) and `timing`. `prompt_logprobs` come once, with the first chunk,
    with None for the first token.

    `text` can lag behind `token_ids` (half a character, or the possible start of a stop string, is held back).
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    usage: TokenUsage | None = None
    timing: Timing | None = None
    index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer of the offline `LLM`. `error` says why when `finish_reason` is "error"."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by; 0 when there are no log probabilities."""
        return sum(each.logprob for each in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


@dataclass(slots=True)
class RequestOutput:
    """The offline `LLM`'s answers to one prompt: one for each of `n` samples, the best first.

    `text`, `token_ids`, `finish_reason`, `error` and `logprobs` are the first one's. `prompt` is None when token ids
    were given.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: TokenUsage
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself once it has started. `features` decides which conformance tests apply."""

    model: str
    backend: str
    max_model_len: int
    block_size: int
    num_blocks: int
    features: frozenset[Feature]
    weights_version: str = ""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, except `state`, `running`, `waiting` and `free_blocks`, which are now.

    `steps` is the progress counter for health checks: with work in an engine that is serving it must move.
    `pending_commands` wait now for the thread that takes the steps, which must move `commands_done` whatever the state.
    `free_blocks` counts cached but unreferenced blocks too. `step_ms` is a moving average.
    """

    state: EngineState = "serving"
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
    pending_commands: int = 0
    commands_done: int = 0


_NOT_A_FAULT = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


def as_request_error(error: BaseException) -> Exception:
    """Returns the error that the request at fault ends with.

    A panic in a Rust library (tokenizers, llguidance) arrives as a BaseException that is no Exception: it is wrapped in
    a RuntimeError. What asks a thread or task to end is raised again.
    """
    if isinstance(error, _NOT_A_FAULT):
        raise error
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
