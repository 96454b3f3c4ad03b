"""Writes one request's answer in OpenAI's two formats, completions and chat, whole or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from uuid import uuid4

from pydantic import BaseModel

from raytide.actors.engine import types
from raytide.actors.serving.openai_api.answers.bodies import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Completion,
    CompletionChoice,
    Delta,
    FinishReason,
    PromptDetails,
    Reply,
    Usage,
    sse,
)
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.generation import ChoiceDelta, GenerationStream
from raytide.actors.serving.openai_api.logprobs import (
    ScoredToken,
    TokenBytes,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
    token_names,
)
from raytide.actors.serving.openai_api.wire import ChatRequest, CompletionRequest, FunctionCall, ToolCall
from raytide.actors.serving.tools.parser import OutputParser, Piece

DONE = b"data: [DONE]\n\n"


class ChoiceState:
    """The text, log probabilities and finish reason of one choice so far."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: FinishReason = "stop"
        self.stop = ""
        self.usage: types.TokenUsage | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[ScoredToken] = []
        self.prompt_logprobs: list[ScoredToken] = []

    def add(self, delta: ChoiceDelta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.usage = delta.usage or self.usage
        self.stop = delta.stop or self.stop
        self.finish_reason = _finish(delta) or self.finish_reason


class ResponseWriter(Protocol):
    id: str

    def set_id(self, request_id: str) -> None:
        """Sets the response's id: OpenAI's prefix, followed by `request_id`. `request_id` is the request's id in usage
        records.
        """

    def full_response(
        self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes
    ) -> BaseModel | dict[str, Any]: ...

    def opening(self, choices: int) -> bytes:
        """Returns the first events of a stream."""

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        """Returns the stream events of one delta."""

    def closing(self, usage: Usage) -> bytes:
        """Returns the last events of a stream."""

    def failure(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that failed."""


class _Writer:
    """The base of the writers for completions and chats. `prefix` begins the ids of answers."""

    _event_type: type[Completion | ChatCompletionChunk]

    def __init__(self, request: CompletionRequest | ChatRequest, generation: GenerationStream, *, prefix: str) -> None:
        self.id = f"{prefix}-{uuid4().hex}"
        self._prefix = prefix
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": request.model}
        self._request, self._generation = request, generation
        self._exclude: set[str] = set() if request.includes_usage else {"usage"}
        self._completion_tokens = 0

    def set_id(self, request_id: str) -> None:
        self.id = self._head["id"] = f"{self._prefix}-{request_id}"

    def closing(self, usage: Usage) -> bytes:
        last = self._event_type.model_validate({**self._head, "choices": [], "usage": usage})
        return (self._event(last) if self._request.includes_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return sse(error.body.model_dump_json())

    def _event(self, body: Completion | ChatCompletionChunk) -> bytes:
        if self._request.includes_usage_always and body.usage is None:
            prompt, completion = self._generation.prompt_tokens, self._completion_tokens
            body.usage = Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
        return sse(body.model_dump_json(exclude=self._exclude))

    def _names(self, bytes_of: TokenBytes) -> TokenBytes:
        return token_names if self._request.return_tokens_as_token_ids else bytes_of

    def _token_ids(self, part: ChoiceState | ChoiceDelta) -> list[int] | None:
        return part.token_ids if self._request.return_token_ids else None

    def _prompt(self, index: int) -> list[int] | None:
        """Returns the token ids of a choice's prompt if the request asks for them, else None."""
        if not self._request.return_token_ids:
            return None
        return list(self._generation.prompts[index // self._generation.sampling.n])

    def _stop_reason(self, part: ChoiceState | ChoiceDelta) -> str | int | None:
        """Returns the stop string or stop token that ended a choice, or None."""
        if part.finish_reason != "stop":
            return None
        last = part.token_ids[-1] if part.token_ids else None
        return part.stop or (last if last in self._generation.sampling.stop_token_ids else None)


class CompletionWriter(_Writer):
    _event_type = Completion

    def __init__(self, request: CompletionRequest, generation: GenerationStream) -> None:
        super().__init__(request, generation, prefix="cmpl")
        self._offsets: dict[int, int] = {}  # of each choice's next token in its text

    def full_response(self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes) -> Completion:
        names = self._names(bytes_of)
        written = [
            CompletionChoice(
                index=index,
                text=choice.text,
                finish_reason=choice.finish_reason,
                logprobs=text_logprobs(choice.logprobs, names) if choice.logprobs else None,
                stop_reason=self._stop_reason(choice),
                token_ids=self._token_ids(choice),
                prompt_token_ids=self._prompt(index),
                prompt_logprobs=prompt_logprobs(choice.prompt_logprobs, bytes_of) if choice.prompt_logprobs else None,
            )
            for index, choice in enumerate(choices)
        ]
        return Completion.model_validate({**self._head, "choices": written, "usage": usage})

    def opening(self, choices: int) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        self._completion_tokens += len(delta.token_ids)
        is_first = delta.index not in self._offsets
        offset = self._offsets.setdefault(delta.index, 0)
        choice = CompletionChoice(
            index=delta.index,
            text=delta.text,
            finish_reason=_finish(delta),
            stop_reason=self._stop_reason(delta),
            token_ids=self._token_ids(delta),
            prompt_token_ids=self._prompt(delta.index) if is_first else None,
        )
        if delta.logprobs:
            choice.logprobs = text_logprobs(delta.logprobs, self._names(bytes_of), offset)
            self._offsets[delta.index] = offset + sum(map(len, choice.logprobs.tokens))
        return self._event(Completion.model_validate({**self._head, "choices": [choice]}))


class ChatWriter(_Writer):
    _event_type = ChatCompletionChunk

    def __init__(self, request: ChatRequest, generation: GenerationStream) -> None:
        super().__init__(request, generation, prefix="chatcmpl")
        self._use = generation.tool_use
        self._shows_reasoning = request.include_reasoning is not False
        self._parsers: dict[int, OutputParser | None] = {}

    def full_response(self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes) -> ChatCompletion:
        written = [
            ChatChoice(
                index=index,
                message=(reply := self._reply(choice)),
                finish_reason=self._finish_reason(choice.finish_reason, bool(reply.tool_calls)),
                logprobs=chat_logprobs(choice.logprobs, self._names(bytes_of)) if choice.logprobs else None,
                stop_reason=self._stop_reason(choice),
                token_ids=self._token_ids(choice),
            )
            for index, choice in enumerate(choices)
        ]
        scored = choices[0].prompt_logprobs
        return ChatCompletion.model_validate(
            {
                **self._head,
                "choices": written,
                "usage": usage,
                "prompt_token_ids": self._prompt(0),
                "prompt_logprobs": prompt_logprobs(scored, bytes_of) if scored else None,
            }
        )

    def opening(self, choices: int) -> bytes:
        role = Delta(role="assistant", content="")
        prompt = {"prompt_token_ids": self._prompt(0)}
        return b"".join(self._choice(ChunkChoice(index=index, delta=role), **prompt) for index in range(choices))

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        """Returns the events of a delta. The text comes first. If the choice has ended, an event with an empty delta
        and the finish reason follows. OpenAI's API sends the finish reason in the same way.
        """
        self._completion_tokens += len(delta.token_ids)
        if delta.index not in self._parsers:
            self._parsers[delta.index] = self._use.parser()
        parser = self._parsers[delta.index]
        logprobs = chat_logprobs(delta.logprobs, self._names(bytes_of)) if delta.logprobs else None
        tokens = self._token_ids(delta)
        carries = bool(delta.logprobs or tokens)
        parts = [Delta(content=delta.text)] if delta.text or carries else []
        if parser is not None:
            ended, pieces = delta.finish_reason, parser.feed(delta.text)
            pieces += [] if ended is None else parser.finish(is_cut=ended == "length")
            shown = [_delta(piece) for piece in pieces if self._shows_reasoning or not piece.reasoning]
            parts = shown or ([Delta(content="")] if carries else [])
        events = b""
        for part in parts:
            choice = ChunkChoice(index=delta.index, delta=part, logprobs=logprobs, token_ids=tokens)
            events += self._choice(choice)
            logprobs = tokens = None
        if (reason := _finish(delta)) is not None:
            reason = self._finish_reason(reason, parser is not None and parser.calls > 0)
            choice = ChunkChoice(index=delta.index, delta=Delta(), finish_reason=reason)
            choice.stop_reason = self._stop_reason(delta)
            events += self._choice(choice)
        return events

    def _reply(self, choice: ChoiceState) -> Reply:
        parser = self._use.parser()
        if parser is None:
            return Reply(content=choice.text)
        pieces = parser.feed(choice.text) + parser.finish(is_cut=choice.finish_reason == "length")
        calls: dict[int, ToolCall] = {}
        for part in (piece.call for piece in pieces if piece.call is not None):
            before = calls.get(part.index)
            name, id = (before.function.name, before.id) if before is not None else (part.name, part.id)
            arguments = (before.function.arguments if before is not None else "") + part.arguments
            function = FunctionCall.model_construct(name=name, arguments=arguments)  # the limits are for requests
            calls[part.index] = ToolCall.model_construct(id=id, type="function", function=function)
        content = "".join(piece.text for piece in pieces)
        return Reply(
            content=content or (None if calls else ""),
            reasoning_content=("".join(piece.reasoning for piece in pieces) or None) if self._shows_reasoning else None,
            tool_calls=list(calls.values()) or None,
        )

    def _finish_reason(self, reason: FinishReason, has_calls: bool) -> FinishReason:
        """Returns "tool_calls" after calls, else `reason`. As at OpenAI, a call forced by name ends with "stop"."""
        return "tool_calls" if reason == "stop" and has_calls and not self._use.is_named else reason

    def _choice(self, choice: ChunkChoice, **more: Any) -> bytes:
        return self._event(ChatCompletionChunk.model_validate({**self._head, "choices": [choice], **more}))


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
    """Returns the usage summed over the prompts. A prompt with several choices counts once, as in OpenAI's bills."""
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
