"""Writes one request's answer in OpenAI's two formats, completions and chat, whole or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from uuid import uuid4

from pydantic import BaseModel

from raytide.actors.engine import types
from raytide.actors.serving.openai_api.chat.tool_choice import ToolUse
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.generation import ChoiceDelta
from raytide.actors.serving.openai_api.logprobs import ScoredToken, TokenBytes, chat_logprobs, text_logprobs
from raytide.actors.serving.openai_api.wire import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    FinishReason,
    FunctionCall,
    PromptDetails,
    Reply,
    ToolCall,
    Usage,
    sse,
)
from raytide.actors.serving.tools.parser import OutputParser, Piece

DONE = b"data: [DONE]\n\n"


class ChoiceState:
    """The text, log probabilities and end of one choice so far."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: FinishReason = "stop"
        self.usage: types.TokenUsage | None = None
        self.logprobs: list[ScoredToken] = []

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.usage = delta.usage or self.usage
        self.finish_reason = _finish(delta) or self.finish_reason


class ResponseWriter(Protocol):
    id: str

    def set_id(self, request_id: str) -> None:
        """Gives the response the id of its request in the usage, after OpenAI's prefix."""

    def full_response(
        self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes
    ) -> BaseModel | dict[str, Any]: ...

    def opening(self, choices: int) -> bytes:
        """Returns the first events of a stream."""

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        """Returns the events of one delta."""

    def closing(self, usage: Usage) -> bytes:
        """Returns the end of a stream."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the end of a stream that failed."""


class _Writer:
    def __init__(self, model: str, *, prefix: str, includes_usage: bool) -> None:
        self.id = f"{prefix}-{uuid4().hex}"
        self._prefix = prefix
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._includes_usage = includes_usage
        self._exclude: set[str] = set() if includes_usage else {"usage"}

    def set_id(self, request_id: str) -> None:
        self.id = self._head["id"] = f"{self._prefix}-{request_id}"

    def failure(self, error: ApiError) -> bytes:
        return sse(error.body.model_dump_json())

    def _event(self, body: Completion | ChatCompletionChunk) -> bytes:
        return sse(body.model_dump_json(exclude=self._exclude))


class CompletionWriter(_Writer):
    def __init__(self, model: str, *, includes_usage: bool = False) -> None:
        super().__init__(model, prefix="cmpl", includes_usage=includes_usage)
        self._offsets: dict[int, int] = {}  # of each choice's next token in its text

    def full_response(self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes) -> Completion:
        written = [
            CompletionChoice(
                index=index,
                text=choice.text,
                finish_reason=choice.finish_reason,
                logprobs=text_logprobs(choice.logprobs, bytes_of) if choice.logprobs else None,
            )
            for index, choice in enumerate(choices)
        ]
        return Completion.model_validate({**self._head, "choices": written, "usage": usage})

    def opening(self, choices: int) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        choice = CompletionChoice(index=delta.index, text=delta.text, finish_reason=_finish(delta))
        if delta.logprobs:
            offset = self._offsets.get(delta.index, 0)
            choice.logprobs = text_logprobs(delta.logprobs, bytes_of, offset)
            self._offsets[delta.index] = offset + sum(map(len, choice.logprobs.tokens))
        return self._event(Completion.model_validate({**self._head, "choices": [choice]}))

    def closing(self, usage: Usage) -> bytes:
        last = Completion.model_validate({**self._head, "choices": [], "usage": usage})
        return (self._event(last) if self._includes_usage else b"") + DONE


class ChatWriter(_Writer):
    def __init__(self, model: str, tool_use: ToolUse, *, includes_usage: bool = False) -> None:
        super().__init__(model, prefix="chatcmpl", includes_usage=includes_usage)
        self._use = tool_use
        self._parsers: dict[int, OutputParser | None] = {}

    def full_response(self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes) -> ChatCompletion:
        written = [
            ChatChoice(
                index=index,
                message=(reply := self._reply(choice.text)),
                finish_reason=self._finish_reason(choice.finish_reason, bool(reply.tool_calls)),
                logprobs=chat_logprobs(choice.logprobs, bytes_of) if choice.logprobs else None,
            )
            for index, choice in enumerate(choices)
        ]
        return ChatCompletion.model_validate({**self._head, "choices": written, "usage": usage})

    def opening(self, choices: int) -> bytes:
        role = Delta(role="assistant", content="")
        return b"".join(self._choice(ChunkChoice(index=index, delta=role)) for index in range(choices))

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        """Returns the events of a delta: the text first, then the finish reason with an empty delta, as OpenAI does."""
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._use.parser()
        parser = self._parsers[delta.index]
        logprobs = chat_logprobs(delta.logprobs, bytes_of) if delta.logprobs else None
        parts = [Delta(content=delta.text)] if delta.text or delta.logprobs else []
        if parser is not None:
            pieces = parser.feed(delta.text) + (parser.finish() if delta.finish_reason is not None else [])
            parts = [_delta(piece) for piece in pieces] or ([Delta(content="")] if delta.logprobs else [])
        events = b""
        for part in parts:
            events += self._choice(ChunkChoice(index=delta.index, delta=part, logprobs=logprobs))
            logprobs = None
        if (reason := _finish(delta)) is not None:
            reason = self._finish_reason(reason, parser is not None and parser.calls > 0)
            events += self._choice(ChunkChoice(index=delta.index, delta=Delta(), finish_reason=reason))
        return events

    def closing(self, usage: Usage) -> bytes:
        last = ChatCompletionChunk.model_validate({**self._head, "choices": [], "usage": usage})
        return (self._event(last) if self._includes_usage else b"") + DONE

    def _reply(self, text: str) -> Reply:
        parser = self._use.parser()
        if parser is None:
            return Reply(content=text)
        pieces = parser.feed(text) + parser.finish()
        calls: dict[int, ToolCall] = {}
        for part in (piece.call for piece in pieces if piece.call is not None):
            before = calls.get(part.index)
            name, id = (before.function.name, before.id) if before is not None else (part.name, part.id)
            arguments = (before.function.arguments if before is not None else "") + part.arguments
            calls[part.index] = ToolCall(id=id, function=FunctionCall(name=name, arguments=arguments))
        content = "".join(piece.text for piece in pieces)
        return Reply(
            content=content or (None if calls else ""),
            reasoning_content="".join(piece.reasoning for piece in pieces) or None,
            tool_calls=list(calls.values()) or None,
        )

    def _finish_reason(self, reason: FinishReason, has_calls: bool) -> FinishReason:
        """Returns the reason. As with OpenAI, a call that the client forced by name ends with "stop"."""
        return "tool_calls" if reason == "stop" and has_calls and not self._use.is_named else reason

    def _choice(self, choice: ChunkChoice) -> bytes:
        return self._event(ChatCompletionChunk.model_validate({**self._head, "choices": [choice]}))


def _delta(piece: Piece) -> Delta:
    call = piece.call
    if call is None:
        return Delta(content=piece.text) if piece.text else Delta(reasoning_content=piece.reasoning)
    function = {"arguments": call.arguments}
    if not call.id:
        return Delta(tool_calls=[{"index": call.index, "function": function}])
    function = {"name": call.name, **function}
    return Delta(tool_calls=[{"index": call.index, "id": call.id, "type": "function", "function": function}])


def usage_of(choices: Iterable[ChoiceState]) -> Usage:
    """Returns the sum over the prompts: a prompt with several choices counts once, as OpenAI bills it."""
    prompts = [choice.usage for choice in choices if choice.usage is not None]
    prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
    completion_tokens = sum(usage.completion_tokens for usage in prompts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(usage.cached_tokens for usage in prompts)),
    )


def _finish(delta: ChoiceDelta) -> FinishReason | None:
    if delta.finish_reason is None:
        return None
    return "length" if delta.finish_reason == "length" else "stop"
