"""Streams through a cluster's gateway that go on all the time, and are compared with what they are undisturbed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

STREAM_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int


class BrokenError(Exception):
    """A stream that did not end as it should: an HTTP status, an error event, or a broken connection.

    `began_s` is in monotonic time; `port` is the client's, None where the connection had not been made.
    """

    def __init__(self, why: str, began_s: float, port: int | None) -> None:
        super().__init__(why)
        self.began_s, self.port = began_s, port


def requests(model: str, count: int, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns paths and bodies: greedy and seeded, texts and chats, some with several choices or penalties."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_p": 0.95, "n": 2},
        {"temperature": 0, "frequency_penalty": 0.5},
    ]
    made = []
    for number in range(count):
        text = f"def function_{number}("
        common = {"model": model, "max_tokens": tokens, "ignore_eos": True, "seed": number, "stream": True}
        body = common | {"stream_options": {"include_usage": True}} | kinds[number % len(kinds)]
        if number % 3:
            made.append(("completions", body | {"prompt": text}))
        else:
            made.append(("chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
    return made


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Returns the whole answer. Raises BrokenError."""
    port, status, raw, began_s = None, 0, bytearray(), time.monotonic()

    async def trace(event: str, details: dict[str, Any]) -> None:
        nonlocal port
        if event == "connection.connect_tcp.complete":
            port = details["return_value"].get_extra_info("client_addr")[1]

    try:
        async with client.stream("POST", path, json=body, extensions={"trace": trace}) as response:
            status = response.status_code
            async for piece in response.aiter_raw():
                raw += piece
        return parsed(raw.decode(), body.get("n", 1))
    except (httpx.TransportError, ValueError) as error:
        after = f"after {time.monotonic() - began_s:.1f} s, status {status} and {bytes(raw[-300:])!r}"
        raise BrokenError(f"{error!r} {after}", began_s, port) from error


def parsed(events: str, choices: int) -> Answer:
    """Returns the answer that the body of a stream has. Raises ValueError for one that is not whole."""
    texts, ends, usage = [""] * choices, [""] * choices, None
    *parts, end = [line.removeprefix("data: ") for line in events.split("\n") if line] or [""]
    if end != "[DONE]":
        raise ValueError("not the end of a stream")
    for part in map(json.loads, parts):
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert usage is not None
    return Answer(tuple(texts), tuple(ends), usage["prompt_tokens"], usage["completion_tokens"])


@dataclass(slots=True)
class Load:
    """Streams that begin again as soon as they end, each on a connection of its own."""

    base_url: str
    asked: Sequence[tuple[str, dict[str, Any]]]
    secrets: Sequence[str] = ()
    """API keys, which the streams use in turn."""
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    """The number of the key, and each whole answer."""
    expected: list[Answer] = field(default_factory=list)
    completed: int = 0
    broken: list[BrokenError] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    _is_over: bool = False
    _workers: list[asyncio.Task[None]] = field(default_factory=list)

    async def learn(self) -> None:
        """Asks everything once, undisturbed."""
        self.expected = list(await asyncio.gather(*[self._once(number) for number in range(len(self.asked))]))

    def start(self) -> None:
        self._workers = [asyncio.create_task(self._work(number)) for number in range(len(self.asked))]

    async def finish(self) -> None:
        """Lets every stream end that has begun."""
        self._is_over = True
        await asyncio.gather(*self._workers)

    async def until(self, what: str, holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not await asyncio.to_thread(holds):  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(0.2)

    async def _once(self, number: int) -> Answer:
        key = number % max(1, len(self.secrets))
        headers = {"authorization": f"Bearer {self.secrets[key]}"} if self.secrets else {}
        options = {"base_url": self.base_url, "headers": headers, "timeout": STREAM_TIMEOUT_S, "verify": False}
        async with httpx.AsyncClient(**options) as client:  # type: ignore[arg-type]
            answer = await stream(client, *self.asked[number])
        self.answers.append((key, answer))
        return answer

    async def _work(self, number: int) -> None:
        while not self._is_over:
            try:
                answer = await self._once(number)
            except BrokenError as error:
                self.broken.append(error)
                continue
            self.completed += 1
            if answer != self.expected[number]:
                self.differing.append(first_difference(number, self.expected[number], answer))


def first_difference(number: int, expected: Answer, found: Answer) -> str:
    for index, (wanted, got) in enumerate(zip(expected.texts, found.texts, strict=True)):
        if wanted != got:
            at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), -1)
            parts = f"{wanted[at : at + 40]!r}, not {got[at : at + 40]!r}"
            return f"request {number}, choice {index}, at {at} of {len(wanted)}: {parts}"
    return f"request {number}: {expected}, not {found}"
