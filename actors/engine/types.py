"""The engine's shared types: requests, chunks, and what an engine reports.

No torch in here: the scheduler, the router and the tests use these without a device.
"""

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
    """One turn of a chat. The assistant's turns may have tool calls; the calls' results are turns of the role `tool`.

    A turn with images has `parts`: its texts, and None for each image. `content` is then the texts alone.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCallTurn, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    parts: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallTurn:
    """A call in a chat's history; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options of a chat's prompt. `template_kwargs` are variables of the chat template, such as Qwen's
    `enable_thinking`; a template ignores variables that it does not know.

    `ending`: `answer` starts the assistant's turn; `open` leaves the last message open, so that the answer continues
    it; `closed` adds nothing after the messages.
    """

    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    ending: Literal["answer", "open", "closed"] = "answer"


PLAIN_PROMPT = PromptOptions()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The output format that a model's chat template reveals: the format of its tool calls, "" if the template has no
    tools. `tagged` outputs may contain reasoning in tags; `open` ones start inside the reasoning.
    """

    tools: Literal["", "hermes", "llama3", "mistral", "deepseek"] = ""
    reasoning: Literal["", "tagged", "open"] = ""


@dataclass(frozen=True, slots=True)
class SampleProgress:
    """The output of one sample that an engine has streamed so far: all its tokens, and its finish reason if it has
    ended.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenRequest:
    """One generation. `prompt` is text or token ids; `request_id` is unique among the requests in flight.

    `priority`: lower values go first, as in vLLM. `deadline_s`: the seconds after arrival within which the first token
    is wanted; the policy "deadline" orders by it. `lora` names a loaded adapter. Requests with different `cache_salt`
    share no prefix.

    `session` and `keep_answer` are for routers alone: the requests of a session go to one replica where that is
    sensible, and an answer may be kept to answer equal requests. `team` and its `weight` serve to share an engine among
    teams.

    `resume` continues a stream that another engine began: it has the progress of each sample by index, and the stream
    has only what follows, as if there had been no interruption. Samples without progress start from the beginning;
    ended ones stay ended. A resumed request goes before new ones, unless it `gave_way` to another request here: then it
    queues like a new one.

    `images` are files, in the order of the prompt's image tokens.

    A request with a `rejoin_key` outlives the connection of its client: its replica computes it to the end and keeps
    the answer for a while, and a request with the same key gets the same stream. `may_be_running` is for routers alone:
    an earlier client may have begun a request with this key.
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
        """The cache salt with a digest of the images: an answer depends on both besides the prompt's tokens."""
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
    """The seconds that a finished request spent in the queue, from its start until its first token, and after it."""

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
    """The output of one step for one of a request's samples. The last chunk of each sample has `finish_reason`; the
    last one of the request also has `usage` (of all samples) and `timing`. `prompt_logprobs` come with the first chunk;
    the entry of the first token is None.

    `text` can lag behind `token_ids`, because an incomplete character or a possible start of a stop string is held
    back. A router names the `replica` in the first chunk. `stop` is the stop string that ended the sample, or "".
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
    """One sample of the offline `LLM`. `error` has the reason when `finish_reason` is "error"."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the tokens, by which `best_of` ranks samples; 0 without log probabilities."""
        return sum(each.logprob for each in self.logprobs) / len(self.logprobs) if self.logprobs else 0.0


@dataclass(slots=True)
class RequestOutput:
    """The offline `LLM`'s output for one prompt: `n` samples, the best first.

    `text`, `token_ids`, `finish_reason`, `error` and `logprobs` are those of the first sample. `prompt` is None when
    token ids were given.
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
    """The properties of a started engine. `features` decides which conformance tests apply. At most `max_running`
    sequences run at once, and `max_waiting` further requests may wait; 0 where that is not known. `quantization` names
    the formats of quantized weights and the inputs that they are computed with; it is empty for a plain model.
    `streamed_layers` is the number of layers that are read from the model's files in every step. A model with
    `num_labels` has a classification head in place of the output head. `local_disk` is the folder of the KV cache on
    disk; empty without one.
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
    """Speculation from one source: the drafts that steps verified, their tokens, and how many of these were right."""

    source: str
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class DiskCounts:
    """The KV cache on local disk: its folder, whether it is in use, its size in bytes, and the prompt tokens whose KV
    was read from it. Blocks are counted if they were evicted, not written because the disk was too slow, or found
    damaged.
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
    """Counters since the start, except `state`, `running`, `waiting`, `free_blocks`, `pending_commands`, `adapters` and
    `weights_version`, which are present values.

    `steps` is the progress counter for health checks: it must increase while a serving engine has work. `commands_done`
    must increase in any state while `pending_commands` wait for the engine's thread. `free_blocks` includes cached,
    unreferenced blocks. `step_ms` is a moving average. A token counts in `generated_tokens` when it is generated; a
    prompt counts when its request ends.
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
    adapters: tuple[str, ...] = ()
    """The names of the loaded adapters."""
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
    """Raises UsageError when the output of sample `index` is complete (`is_over`) although its progress has no finish
    reason.
    """
    if is_over and request.resume[index].finish_reason is None:
        raise UsageError(
            f"request {request.request_id} cannot be resumed: the output of sample {index} is complete.",
            hint="Give its finish reason, or pass the tokens as they were streamed.",
        )


_NOT_A_FAULT = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


def as_request_error(error: BaseException) -> Exception:
    """Returns the error with which a request ends that caused `error`.

    A panic in a Rust library (tokenizers, llguidance) is a BaseException, and is wrapped in a RuntimeError. Exceptions
    that ask a thread or task to end are raised again.
    """
    if isinstance(error, _NOT_A_FAULT):
        raise error
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
