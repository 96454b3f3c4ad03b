"""Writes the answer to a request of the Responses API, in one piece or as typed events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from raytide.actors.serving.openai_api.answers.bodies import Usage
from raytide.actors.serving.openai_api.answers.writer import ChoiceState
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.openai_api.generation import ChoiceDelta, GenerationStream
from raytide.actors.serving.openai_api.logprobs import TokenBytes, chat_logprobs
from raytide.actors.serving.protocols.responses_api.request import ResponsesRequest
from raytide.actors.serving.protocols.responses_api.stored import item_id
from raytide.actors.serving.tools.parser import OutputParser, Piece

Item = dict[str, Any]


class ResponsesWriter:
    """Writes output items (reasoning, a message, tool calls) as text arrives. Only one item is open at a time, and
    events extend the open item.
    """

    def __init__(self, request: ResponsesRequest, generation: GenerationStream) -> None:
        self.id = f"resp_{uuid4().hex}"
        self._request = request
        self._parser = generation.tool_use.parser() or OutputParser()
        self._created_s = int(time.time())
        self._items: list[Item] = []
        self._sequence = 0
        self._is_cut = False
        self._scored: list[Item] = []
        """The log probabilities of tokens whose text is still held back."""
        self.response: Item | None = None
        """The whole response, once it is complete."""

    def set_id(self, request_id: str) -> None:
        self.id = f"resp_{request_id}"

    def full_response(self, choices: Sequence[ChoiceState], usage: Usage, bytes_of: TokenBytes) -> Item:
        (choice,) = choices
        self._is_cut = choice.finish_reason == "length"
        for piece in self._pieces(choice.text, choice.finish_reason):
            self._events_of(piece, [])
        self._close([], self._last_status)
        if choice.logprobs:
            scored = chat_logprobs(choice.logprobs, bytes_of).model_dump()["content"]
            for item in self._items:
                if item["type"] == "message":
                    item["content"][0]["logprobs"] = scored
        self.response = self._response(usage)
        return self.response

    def opening(self, choices: int) -> bytes:
        response = {**self._response(None), "status": "in_progress"}
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def chunk(self, delta: ChoiceDelta, bytes_of: TokenBytes) -> bytes:
        if delta.logprobs:
            self._scored += chat_logprobs(delta.logprobs, bytes_of).model_dump()["content"]
        self._is_cut = delta.finish_reason == "length"
        out: list[bytes] = []
        for piece in self._pieces(delta.text, delta.finish_reason):
            self._events_of(piece, out, self._scored)
            self._scored = []
        return b"".join(out)

    def closing(self, usage: Usage) -> bytes:
        out: list[bytes] = []
        self._close(out, self._last_status)
        kind = f"response.{self._last_status}"
        self.response = self._response(usage)
        return b"".join([*out, self._event(kind, response=self.response)])

    def failure(self, error: ApiError) -> bytes:
        body = error.body.error
        return self._event("error", message=body.message, code=body.code, param=body.param)

    def _pieces(self, text: str, reason: str | None) -> list[Piece]:
        """Returns the pieces of new text. `reason` is the finish reason if the output ends with this text."""
        pieces = self._parser.feed(text)
        return pieces if reason is None else pieces + self._parser.finish(is_cut=reason == "length")

    def _events_of(self, piece: Piece, out: list[bytes], scored: Sequence[Item] = ()) -> None:
        if (call := piece.call) is not None:
            if call.id:
                item = {"call_id": call.id, "name": call.name, "arguments": ""}
                self._open("function_call", "fc", item, out)
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                out.append(self._event("response.function_call_arguments.delta", delta=call.arguments, **self._place()))
            return
        kind, text = ("reasoning", piece.reasoning) if piece.reasoning else ("message", piece.text)
        if not (self._items and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"):
            fields: Item = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            self._open(kind, "rs" if kind == "reasoning" else "msg", {**fields, "content": []}, out)
            part = _part(kind)
            out.append(self._event("response.content_part.added", part=part, content_index=0, **self._place()))
            self._items[-1]["content"] = [part]
        self._items[-1]["content"][0]["text"] += text
        more: Item = {}
        if kind == "message":
            more["logprobs"] = list(scored)
            self._items[-1]["content"][0]["logprobs"] += scored
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        out.append(self._event(name, delta=text, content_index=0, **more, **self._place()))

    def _open(self, kind: str, prefix: str, fields: Item, out: list[bytes]) -> None:
        self._close(out, "completed")
        id = item_id(prefix, self.id, len(self._items))
        item = {"type": kind, "id": id, "status": "in_progress", **fields}
        self._items.append(item)
        out.append(self._event("response.output_item.added", item=item, output_index=len(self._items) - 1))

    @property
    def _last_status(self) -> str:
        """The status of the response, and of its last item: those before it are complete, also where it is cut."""
        return "incomplete" if self._is_cut else "completed"

    def _close(self, out: list[bytes], status: str) -> None:
        """Ends the open item, if there is one, with this status."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            if _is_json(item["arguments"]):  # the answer was cut behind the call
                item["status"] = "completed"
            done = {"arguments": item["arguments"], "name": item["name"]}
            out.append(self._event("response.function_call_arguments.done", **done, **self._place()))
        else:
            (part,) = item["content"]
            is_text = item["type"] == "message"
            more: Item = {"logprobs": part["logprobs"]} if is_text else {}
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            out.append(self._event(name, text=part["text"], content_index=0, **more, **self._place()))
            out.append(self._event("response.content_part.done", part=part, content_index=0, **self._place()))
        out.append(self._event("response.output_item.done", item=item, output_index=len(self._items) - 1))

    def _place(self) -> Item:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n".encode()

    def _response(self, usage: Usage | None) -> Item:
        asked = self._request
        text = {} if asked.text is None else asked.text.model_dump(exclude_none=True)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": self._last_status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": asked.model,
            "output": self._items,
            "previous_response_id": asked.previous_response_id,
            "reasoning": asked.reasoning and asked.reasoning.model_dump(exclude_none=True),
            "store": asked.store is not False,
            "text": {"format": {"type": "text"}, **text},
            "truncation": "disabled",
            "user": asked.user,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "tool_choice": asked.tool_choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in asked.tools or ()],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "usage": None if usage is None else _usage(usage),
        }


def _part(kind: str) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Item:
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
