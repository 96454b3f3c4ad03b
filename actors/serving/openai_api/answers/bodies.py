"""The bodies of answers of OpenAI's HTTP API, field for field as the official client types them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from raytide.actors.serving.openai_api.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs
from raytide.actors.serving.openai_api.wire import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


def _is_none(value: object) -> bool:
    return value is None


_ABSENT: Any = Field(default=None, exclude_if=_is_none)
"""An extension that vLLM has too, left out where it says nothing."""


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
    stop_reason: str | int | None = _ABSENT
    token_ids: list[int] | None = _ABSENT
    prompt_token_ids: list[int] | None = _ABSENT
    prompt_logprobs: PromptLogprobs | None = _ABSENT


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
    """The assistant's message in an answer.

    `tool_calls` and `reasoning_content` are left out on the wire where there are none.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None

    @model_serializer(mode="wrap")
    def _present(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in ("reasoning_content", "tool_calls")
        }


class ChatChoice(BaseModel):
    index: int
    message: Reply
    finish_reason: FinishReason
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = _ABSENT
    token_ids: list[int] | None = _ABSENT


class ChatCompletion(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = _ABSENT
    prompt_logprobs: PromptLogprobs | None = _ABSENT


class Delta(BaseModel):
    """A streamed piece of a message. Fields that are None are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @model_serializer
    def _present(self) -> dict[str, Any]:
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = _ABSENT
    token_ids: list[int] | None = _ABSENT


class ChatCompletionChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = _ABSENT


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
    """Returns one server-sent event."""
    return b"data: " + data.encode() + b"\n\n"
