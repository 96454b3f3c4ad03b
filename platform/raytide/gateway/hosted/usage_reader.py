"""Reads what a hosted API answers: the model's name and the id are replaced, and the tokens are counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from raytide.actors.engine.types import TokenUsage
from raytide.core.errors import EngineError

_MOST_LINE_BYTES = 8 << 20
_DATA = b"data:"


class UsageReader:
    """One answer. `usage` has the tokens that the API reported; until then, one for each piece of text so far."""

    def __init__(self, model: str, prompt_tokens: int, *, shows_usage: bool, id: str = "") -> None:
        """`id` takes the place of the answer's, so that it names the request in the usage."""
        self._model, self._prompt_tokens, self._shows_usage, self._id = model, prompt_tokens, shows_usage, id
        self._reported: TokenUsage | None = None
        self._pieces = 0
        self._rest = b""

    @property
    def usage(self) -> TokenUsage:
        return self._reported or TokenUsage(self._prompt_tokens, self._pieces)

    def whole(self, body: bytes) -> bytes:
        """Returns an answer that is not streamed, under this endpoint's name."""
        return json.dumps(self._read(_parsed(body))).encode()

    def events(self, piece: bytes) -> Iterator[bytes]:
        """Yields the whole lines of a stream, under this endpoint's name, as its bytes arrive."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _MOST_LINE_BYTES:
            raise EngineError("the hosted API sends a line without end.")
        for line in lines:
            data = line.removeprefix(_DATA).strip()
            if not line.startswith(_DATA) or data == b"[DONE]":
                yield line + b"\n"
                continue
            event = self._read(_parsed(data))
            if self._shows_usage or event.get("choices") != [] or not event.get("usage"):
                yield _DATA + b" " + json.dumps(event).encode() + b"\n"

    def _read(self, answer: dict[str, Any]) -> dict[str, Any]:
        inner = answer.get("response")  # events of the Responses API
        for each in (answer, inner):
            if isinstance(each, dict):
                if "model" in each:
                    each["model"] = self._model
                if self._id and isinstance(each.get("id"), str):
                    each["id"] = self._id
                self._reported = _usage(each.get("usage")) or self._reported
        choices = answer.get("choices")
        self._pieces += len(choices) if isinstance(choices, list) else str(answer.get("type", "")).endswith(".delta")
        return answer


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise EngineError("the hosted API answers with something that is no JSON object.")
    return parsed


def _usage(reported: object) -> TokenUsage | None:
    if not isinstance(reported, dict):
        return None
    details = reported.get("prompt_tokens_details") or reported.get("input_tokens_details")
    return TokenUsage(
        _count(reported, "prompt_tokens", "input_tokens"),
        _count(reported, "completion_tokens", "output_tokens"),
        _count(details, "cached_tokens") if isinstance(details, dict) else 0,
    )


def _count(reported: dict[str, Any], *names: str) -> int:
    found = next((reported[name] for name in names if isinstance(reported.get(name), int)), 0)
    return max(0, found)
