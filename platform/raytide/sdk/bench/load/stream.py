"""Sends one streamed request and times its tokens as they arrive. Each kind of failure has a code."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_MOST_ERROR_BYTES = 10_000


@dataclass(slots=True)
class BenchRecord:
    """The record of one request. All times are in seconds: `due_s` and `sent_s` count from the start of the
    measurement, `ttft_s` and `e2e_s` from the sending of the request.
    """

    due_s: float
    """The time at which it should have been sent."""
    sent_s: float = 0.0
    ttft_s: float | None = None
    """The time to its first token; None before it arrives."""
    e2e_s: float | None = None
    """The time to its end, or to its failure; None while it runs."""
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """The times between events that carry tokens."""
    prompt_tokens: int = 0
    """The prompt tokens, as the server counts them once it has answered."""
    wanted_tokens: int = 0
    """The number of tokens that the request asked for."""
    cached_tokens: int = 0
    usage_tokens: int | None = None
    """The number of generated tokens as the server counts them; None if it did not report it."""
    error: str = ""
    """The code of the failure: HTTP's status and the server's own code, `timeout`, `connection`,
    `malformed`, or `incomplete`."""

    @property
    def is_answered(self) -> bool:
        return self.e2e_s is not None and not self.error

    @property
    def output_tokens(self) -> int:
        """The number of generated tokens, as reported by the server. If the server reports no number, this is the
        number of events that carry tokens.
        """
        if self.usage_tokens is not None:
            return self.usage_tokens
        return 0 if self.ttft_s is None else 1 + len(self.gaps_s)

    @property
    def tpot_s(self) -> float | None:
        """The mean time in seconds per token after the first. None while the request is open or has fewer than two
        tokens.
        """
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)


async def send(session: aiohttp.ClientSession, url: str, body: bytes, record: BenchRecord, start_s: float) -> None:
    """Sends one request and fills in its record. `start_s` is the time at which the measurement began, as read from
    `time.perf_counter`.
    """
    sent_s = time.perf_counter()
    record.sent_s = sent_s - start_s
    answer = _Answer(record, sent_s)
    try:
        async with session.post(url, data=body) as response:
            if response.status != 200:
                record.error = f"{response.status} {_code_of(await response.content.read(_MOST_ERROR_BYTES))}".strip()
            else:
                async for piece in response.content.iter_any():
                    answer.feed(piece)
                if not record.error and not answer.has_ended:
                    record.error = "incomplete"
    except TimeoutError:
        record.error = "timeout"
    except aiohttp.ClientError:
        record.error = "connection"
    except ValueError:  # an event that is no JSON
        record.error = "malformed"
    record.e2e_s = (time.perf_counter() if record.error else answer.last_s) - sent_s


class _Answer:
    """Reads the events of one stream into its record."""

    def __init__(self, record: BenchRecord, sent_s: float) -> None:
        self._record, self._sent_s = record, sent_s
        self._rest = b""
        self.last_s = sent_s
        """The time of the last token."""
        self.has_ended = False

    def feed(self, piece: bytes) -> None:
        now_s = time.perf_counter()
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for data in _data_of(event):
                if data == b"[DONE]":
                    self.has_ended = True
                else:
                    self._take(json.loads(data), now_s)

    def _take(self, event: Mapping[str, Any], now_s: float) -> None:
        record = self._record
        if "error" in event:
            record.error = f"stream {_error_code(event['error'])}".strip()
        if any(map(_has_token, event.get("choices") or ())):
            if record.ttft_s is None:
                record.ttft_s = now_s - self._sent_s
            else:
                record.gaps_s.append(now_s - self.last_s)
            self.last_s = now_s
        if usage := event.get("usage"):
            record.usage_tokens = int(usage.get("completion_tokens") or 0)
            record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Returns whether an event's choice has output: some events of a chat have only the role, or the finish reason."""
    if "delta" not in choice:
        return True
    delta = choice["delta"] or {}
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls", "refusal"))


def _data_of(event: bytes) -> Iterator[bytes]:
    """Yields the `data` fields of an event; comments and other fields are left out."""
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _code_of(body: bytes) -> str:
    try:
        found = json.loads(body)
    except ValueError:
        return ""
    return _error_code(found.get("error", found)) if isinstance(found, dict) else ""


def _error_code(error: object) -> str:
    if not isinstance(error, dict):
        return ""
    return str(error.get("code") or error.get("type") or "")[:100]
