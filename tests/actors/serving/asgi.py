"""Requests to an app in this process, message by message, without a socket: any body, cut anywhere."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from starlette.types import ASGIApp, Message

PIECE = 1 << 16


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def error(self) -> dict[str, object]:
        return dict(json.loads(self.body)["error"])


async def ask(
    app: ASGIApp,
    path: str,
    body: bytes | Sequence[bytes] = b"",
    *,
    method: str = "POST",
    leaves: bool = False,
    leaves_after_body: bool = False,
    **headers: str,
) -> Answer:
    """`leaves`: the client closes its connection after these pieces, instead of ending its body."""
    pieces = [body[at : at + PIECE] for at in range(0, len(body), PIECE)] if isinstance(body, bytes) else list(body)
    waiting: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    waiting.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": b"", "more_body": False})
    if leaves_after_body:
        waiting.append({"type": "http.disconnect"})
    sent: list[Message] = []

    async def receive() -> Message:
        if waiting:
            return waiting.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    named = {"content_type": "application/json"} | headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(errors="replace"),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, receive, send)
    if not sent:
        return Answer(0, b"")
    return Answer(sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]))


class Turns:
    """The CPU time of the longest turn of the event loop, in which it did nothing for anybody else."""

    longest_s = 0.0


@contextmanager
def timed_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    run, turns = asyncio.events.Handle._run, Turns()  # type: ignore[attr-defined]

    def timed(handle: object) -> None:
        began_s = time.thread_time()
        run(handle)
        turns.longest_s = max(turns.longest_s, time.thread_time() - began_s)

    gc.collect()
    gc.freeze()  # as a replica does: the modules that the tests have loaded are many
    try:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.events.Handle, "_run", timed)
            yield turns
    finally:
        gc.unfreeze()
