"""The bodies of OpenAI's HTTP API that raytide reads and writes, field for field as the official client types them.

Requests keep fields that are not listed here (`model_extra`): `params` says which are ignored and which refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_serializer

from raytide.actors.engine.limits import MAX_LOGPROBS
from raytide.actors.serving.logprobs import ChatLogprobs, TextLogprobs
from raytide.actors.serving.structure import Constraints

__all__ = [
    "ChatChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatMessage",
    "ChatRequest",
    "ChunkChoice",
    "Completion",
    "CompletionChoice",
    "CompletionRequest",
    "Delta",
    "FinishReason",
    "GenerationRequest",
    "Model",
    "ModelList",
    "Part",
    "PromptDetails",
    "Reply",
    "StreamOptions",
    "Usage",
    "sse",
]

FinishReason = Literal["stop", "length"]


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class StreamOptions(_Request):
    include_usage: bool = False


class GenerationRequest(_Request, Constraints):
    """What chat and plain completions share. From `top_k` on they are extensions that vLLM's clients know too."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    prompt: str | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None


class Part(_Request):
    type: str
    text: str | None = None


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class PromptDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: TextLogprobs | None = None


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    usage: Usage | None = None


class Completion(_Answer):
    """Also the form of a streamed chunk."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class Reply(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: Reply
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class Delta(BaseModel):
    """Fields that are None are left out on the wire."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer
    def _present(self) -> dict[str, str]:
        return {name: value for name, value in (("role", self.role), ("content", self.content)) if value is not None}


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "raytide"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


def sse(data: str) -> bytes:
    """One server-sent event."""
    return b"data: " + data.encode() + b"\n\n"
