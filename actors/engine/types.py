"""The engine's shared types: requests, chunks, and what an engine reports.

This module does not import torch. The scheduler, the router and the tests use it without a device."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from raytide.actors.engine.sampling_params import SamplingParams
from raytide.core.errors import UsageError

EngineState = Literal["serving", "paused", "asleep"]
FinishReason = Literal["stop", "length", "abort", "error"]
Feature = Literal[
    "bad_words",
    "best_of",
    "classification",
    "deterministic",
    "embeddings",
    "handover",
    "images",
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
    "resume",
    "sampling",
    "sleep",
    "stop_strings",
    "structured",
    "weights_swap",
]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat. An assistant's turn may have tool calls. The results of the calls are turns with the role
    `tool`.

    A turn with images has `parts`: its texts, and None in place of each image. `content` then has only the texts."""

    role: str
    content: str
    tool_calls: tuple[ToolCallTurn, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallTurn:
    """A tool call in a chat's history. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options of a chat's prompt. `template_kwargs` are variables of the chat template, such as Qwen's
    `enable_thinking`. A template ignores variables that it does not know.

    `ending` is `answer` to start the assistant's turn, `open` to let the answer continue the last message, or `closed`
    to add nothing after the messages.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ending: Literal["answer", "open", "closed"] = "answer"


PLAIN_PROMPT = PromptOptions()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The output format that a model's chat template reveals.

    `tools` is the format of tool calls. It is empty if the template has no tools. `reasoning` is `tagged` if outputs
    may contain reasoning in tags. It is `open` if outputs start inside the reasoning. Otherwise it is empty.
    """

    tools: Literal["", "hermes", "qwen3_coder", "llama3", "mistral", "deepseek"] = ""
    reasoning: Literal["", "tagged", "open"] = ""


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """The output of one sample that an engine has streamed so far: all tokens, and the finish reason if the sample has
    ended.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRequest:
    """One generation. `prompt` is text or token ids. `request_id` is unique among the requests in flight. `images` are
    image files, in the order of the prompt's image tokens.

    A lower `priority` goes first, as in vLLM. The first token is wanted within `deadline_s` seconds after arrival.
    The scheduling policy "deadline" orders requests by the time at which the first token is wanted. `lora` names a
    loaded adapter. Requests with different `cache_salt` share no prefix. If requests belong to several teams
    (`team`), each team's share of the engine is proportional to its `weight`.

    `resume` continues a stream that another engine began. `resume` has the progress of each sample, by index. The
    new stream contains only the rest. Samples without progress start from the beginning. Ended samples stay ended. A
    resumed request normally goes before new ones. If `gave_way` is true, this engine has preempted the request in
    favour of another one, and the request queues like a new one.

    Only routers read `session`, `keep_answer` and `may_be_running`. Requests of a `session` go to one replica where
    that is sensible. With `keep_answer`, the answer may be kept for equal requests. `may_be_running` says that an
    earlier client may have begun a request with this `rejoin_key`.

    A request with a `rejoin_key` outlives its client's connection: the replica computes it to the end and keeps the
    answer for a while. Another request with the same key gets the same stream.
    """

    request_id: str
    prompt: str | Items[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline_s: float | None = None
    lora: str | None = None
    cache_salt: str = ""
    session: str = ""
    keep_answer: bool = False
    team: str = ""
    weight: float = 1.0
    resume: tuple[SampleProgress, ...] = ()
    gave_way: bool = False
    images: tuple[bytes, ...] = ()
    rejoin_key: str = ""
    may_be_running: bool = False

    def __post_init__(self) -> None:
        if self.resume:
            _check_resume(self)

    @property
    def salt(self) -> str:
        """The cache salt, combined with a digest of the images. Two requests with different images may have the same
        prompt tokens. Because their salts differ, the two requests share no cached prefix and no answer.
        """
        if not self.images:
            return self.cache_salt
        digests = [blake2b(each, digest_size=16).hexdigest() for each in self.images]
        return f"{self.cache_salt}\0{' '.join(digests)}"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a request. `cached_tokens` is the number of prompt tokens whose KV came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """The duration of a finished request in seconds, split into three phases: in the queue, from the start to the first
    token, and after the first token.
    """

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability under the model's own distribution, its rank (from 1), and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenChunk:
    """The output of one step for one sample of a request. The last chunk of a sample has `finish_reason`. The last
    chunk of the request has `usage` of all samples, and `timing`. If prompt log probabilities are requested, the first
    chunk of the first sample has `prompt_logprobs`, whose first entry is None.

    `text` can lag behind `token_ids`, because incomplete characters and possible starts of stop strings are held back.
    A router names the `replica` in the first chunk. `stop` is the stop string that ended the sample, or "".
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
    replica: str = ""
    stop: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One sample in the output of `LLM`. If `finish_reason` is "error", `error` contains the reason."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the tokens, by which `best_of` ranks samples. It is 0 if there are no log
        probabilities.
        """
        return sum(each.logprob for each in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


@dataclass(slots=True)
class RequestOutput:
    """The output of `LLM` for one prompt: `n` samples, the best first.

    `text`, `token_ids`, `finish_reason`, `error` and `logprobs` are those of the first sample. `prompt` is None if the
    prompt was given as token ids.
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
    """The properties of a started engine. `features` are its optional features. The engine runs at most `max_running`
    sequences, and at most `max_waiting` more requests wait. A limit of 0 means that the limit is unknown.

    `quantization` names the formats of the quantized weights and of the inputs of the quantized layers.
    `quantization` is empty for a model without quantized weights. In every step, `streamed_layers` layers are read
    from the model's files. A model with `num_labels` has a classification head. `local_disk` is the folder of the KV
    cache on disk, or empty.
    """

    model: str
    backend: str
    max_model_len: int
    block_size: int
    num_blocks: int
    features: frozenset[Feature]
    weights_version: str = ""
    chat: ChatFormat = ChatFormat()
    max_running: int = 0
    max_waiting: int = 0
    quantization: str = ""
    streamed_layers: int = 0
    num_labels: int = 0
    local_disk: str = ""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """The counts of speculation from one source: verified drafts, the tokens in these drafts, and how many tokens were
    right.
    """

    source: str
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class DiskCounts:
    """The state and counts of the KV cache on local disk. `bytes` is its size. `hit_tokens` are prompt tokens whose KV
    was read from disk. `skipped_blocks` were not written because the disk was too slow.
    """

    path: str = ""
    is_on: bool = False
    bytes: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    skipped_blocks: int = 0
    damaged_blocks: int = 0


@dataclass(slots=True)
class EngineStats:
    """The counters of an engine since its start, and some present values: `state`, `running`, `waiting`, `free_blocks`,
    `pending_commands`, `adapters` and `weights_version`.

    Health checks watch two counters. `steps` must increase while a serving engine has work. `commands_done` must
    increase in any state while there are `pending_commands`. `free_blocks` includes cached blocks that no sequence
    uses. `step_ms` is a moving average. A generated token is counted at once, but a prompt only when its request ends.
    `finished` counts all requests that ended, also those that failed or were aborted.
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
    adapters: Mapping[str, str] = field(default_factory=dict)
    """The loaded adapters: each name with a text that changes with its files."""
    weights_version: str = ""
    """The version of the present weights, which a swap changes; empty for an engine that does not report it."""
    speculation: tuple[DraftCounts, ...] = ()
    """The counts for each source of drafts that the engine may use."""
    disk: DiskCounts | None = None
    """The counts of the KV cache on disk; None without such a cache."""


def _check_resume(request: GenRequest) -> None:
    """Raises UsageError when the progress does not fit the request, or when nothing is left to generate."""
    params, resume = request.sampling, request.resume
    if params.num_samples > params.n:
        why = "best_of streams nothing before all samples have ended"
    elif len(resume) > params.n:
        why = f"the progress of {len(resume)} samples, but n is {params.n}"
    elif len(resume) == params.n and all(each.finish_reason for each in resume):
        why = "all samples have ended"
    else:
        for index, each in enumerate(resume):
            check_progress(request, index, is_over=len(each.token_ids) >= (params.max_tokens or math.inf))
        return
    raise UsageError(f"request {request.request_id} cannot be resumed: {why}.", hint="Send it without resume.")


def check_progress(request: GenRequest, index: int, *, is_over: bool) -> None:
    """Raises UsageError if the output of sample `index` is complete (`is_over`), but the sample's progress has no
    finish reason.
    """
    if is_over and request.resume[index].finish_reason is None:
        raise UsageError(
            f"request {request.request_id} cannot be resumed: the output of sample {index} is complete.",
            hint="Give its finish reason, or pass the tokens as they were streamed.",
        )


_NOT_A_FAULT = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


def as_request_error(error: BaseException) -> Exception:
    """Returns the error that a request must report after `error` was raised in its work.

    A panic in a Rust library (tokenizers, llguidance) is a BaseException and is wrapped in RuntimeError. Other
    exceptions are returned unchanged. Exceptions that only stop a thread or task, such as cancellation, are raised
    again.
    """
    if isinstance(error, _NOT_A_FAULT):
        raise error
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
