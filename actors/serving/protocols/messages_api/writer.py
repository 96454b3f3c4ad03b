"""Writes the answer to a request of the Messages API, in one piece or as typed events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from raytide.actors.serving.openai_api.answers.bodies import Usage
from raytide.actors.serving.openai_api.answers.writer import ChoiceState
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.generation import ChoiceDelta, GenerationStream
from raytide.actors.serving.openai_api.logprobs import TokenBytes
from raytide.actors.serving.protocols.messages_api.errors import error_body
from raytide.actors.serving.protocols.messages_api.request import MessagesRequest
from raytide.actors.serving.tools.parser import OutputParser, Piece

Item = dict[str, Any]
_INPUT: TypeAdapter[Item] = TypeAdapter(Item)


class MessagesWriter:
    """Writes content blocks (thinking, text, tool calls) as text arrives. Only one block is open at a time, and deltas
    extend the open block.
    """

    def __init__(self, request: MessagesRequest, generation: GenerationStream) -> None:
        self.id = f"msg_{uuid4().hex}"
        self._request = request
        self._prompt_tokens = generation.prompt_tokens
        self._parser = generation.tool_use.parser() or OutputParser()
        self._blocks: list[Item] = []
        self._inputs: list[str] = []
        """The JSON text of each call's input so far."""
        self._is_open = False
        self._is_cut = False
        self._stop: str | None = None

    def set_id(self, request_id: str) -> None:
        self.id = f"msg_{request_id}"

    def full_response(self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes) -> Item:
        (choice,) = choices
        self._is_cut, self._stop = choice.finish_reason == "length", choice.stop or None
        for piece in self._parser.feed(choice.text) + self._parser.finish(is_cut=self._is_cut):
            self._events_of(piece, [])
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _parsed(self._inputs.pop(0))
        return {**self._message(usage), "content": self._blocks, **self._end(usage)}

    def opening(self, choices: int) -> bytes:
        before = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=0, total_tokens=self._prompt_tokens)
        return _event("message_start", message=self._message(before))

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        is_end = delta.finish_reason is not None
        self._is_cut, self._stop = delta.finish_reason == "length", delta.stop or None
        out: list[bytes] = []
        for piece in self._parser.feed(delta.text) + (self._parser.finish(is_cut=self._is_cut) if is_end else []):
            self._events_of(piece, out)
        return b"".join(out)

    def closing(self, usage: Usage) -> bytes:
        out: list[bytes] = []
        self._close(out)
        out.append(_event("message_delta", delta=self._end(usage), usage=_usage(usage)))
        return b"".join([*out, _event("message_stop")])

    def failure(self, error: ApiError) -> bytes:
        return _sse("error", error_body(error))

    def _events_of(self, piece: Piece, out: list[bytes]) -> None:
        if (call := piece.call) is not None:
            if call.id:
                id = f"toolu_{call.id.removeprefix('call_')}"
                self._open({"type": "tool_use", "id": id, "name": call.name, "input": {}}, out)
                self._inputs.append("")
            if call.arguments:
                self._inputs[-1] += call.arguments
                self._delta({"type": "input_json_delta", "partial_json": call.arguments}, out)
            return
        kind, text = ("thinking", piece.reasoning) if piece.reasoning else ("text", piece.text)
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            more: Item = {"signature": ""} if kind == "thinking" else {"citations": None}
            self._open({"type": kind, kind: "", **more}, out)
        self._blocks[-1][kind] += text
        self._delta({"type": f"{kind}_delta", kind: text}, out)

    def _open(self, block: Item, out: list[bytes]) -> None:
        self._close(out)
        self._blocks.append(block)
        self._is_open = True
        out.append(_event("content_block_start", index=len(self._blocks) - 1, content_block=block))

    def _delta(self, delta: Item, out: list[bytes]) -> None:
        out.append(_event("content_block_delta", index=len(self._blocks) - 1, delta=delta))

    def _close(self, out: list[bytes]) -> None:
        """Ends the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            if self._blocks[-1]["type"] == "thinking":  # clients expect one before they accept the block
                self._delta({"type": "signature_delta", "signature": ""}, out)
            out.append(_event("content_block_stop", index=len(self._blocks) - 1))

    def _message(self, usage: Usage) -> Item:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _end(self, usage: Usage) -> Item:
        reason = "end_turn"
        if self._is_cut:
            is_full = usage.completion_tokens < self._request.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif self._parser.calls:
            reason = "tool_use"
        elif self._stop is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": self._stop if reason == "stop_sequence" else None}


def _parsed(text: str) -> Item:
    """Returns the input of a call; of a call that was cut off, the part that can be parsed. NaN and infinity, which are
    not JSON, become None.
    """
    try:
        found = _INPUT.validate_json(text, experimental_allow_partial="trailing-strings")
        return _INPUT.validate_json(_INPUT.dump_json(found))
    except ValueError:
        return {}


def _usage(usage: Usage) -> Item:
    """Returns the usage in Anthropic's format, in which the input tokens do not include the cached ones."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return _sse(kind, {"type": kind, **fields})


def _sse(kind: str, body: Item) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()
