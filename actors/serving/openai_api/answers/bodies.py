"""The bodies of answers of OpenAI's HTTP API, with the same fields and types as in OpenAI's own client library."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from raytide.actors.serving.openai_api.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs
from raytide.actors.serving.openai_api.wire import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]

ABSENT: Any = Field(default=None, exclude_if=lambda value: value is None)
"""The default of a field that is omitted while it is None, such as an extension that vLLM has too."""


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
    stop_reason: str | int | None = ABSENT
    token_ids: list[int] | None = ABSENT
    prompt_token_ids: list[int] | None = ABSENT
    prompt_logprobs: PromptLogprobs | None = ABSENT


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    usage: Usage | None = None


class Completion(_Answer):
    """A completion, whole or as a streamed chunk."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class Reply(BaseModel):
    """The assistant's message in an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = ABSENT
    tool_calls: list[ToolCall] | None = ABSENT


class ChatChoice(BaseModel):
    index: int
    message: Reply
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = ABSENT
    token_ids: list[int] | None = ABSENT


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = ABSENT
    prompt_logprobs: PromptLogprobs | None = ABSENT


class Delta(BaseModel):
    """A streamed piece of a message."""

    role: Literal["assistant"] | None = ABSENT
    content: str | None = ABSENT
    reasoning_content: str | None = ABSENT
    tool_calls: list[dict[str, Any]] | None = ABSENT


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = ABSENT
    token_ids: list[int] | None = ABSENT


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = ABSENT


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "raytide"
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


def sse(data: str) -> bytes:
    """Returns `data` as one server-sent event."""
    return b"data: " + data.encode() + b"\n\n"
