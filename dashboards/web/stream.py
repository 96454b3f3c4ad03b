"""The live stream of the web page: server-sent events with changes, computed once for all listeners of a team."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from raytide.core.errors import QuotaError, RaytideError
from raytide.dashboards.web.picture import PagePicture, Row

_log = logging.getLogger(__name__)

PERIOD_S = 1.0
"""The time between two pictures."""
BEAT_S = 10.0
"""The longest silence of a stream; its token is checked again after this time, too."""
SEND_S = 15.0
"""A listener that does not take a message within this time is dropped; it may come back."""
MOST_QUEUED = 20
"""The most messages that may wait for a listener. Beyond it the listener is dropped, because it would show an outdated
state.
"""
MOST_LISTENERS = 200
"""The most open streams. Beyond it, the team with the most streams loses its oldest one to another team."""
LONGEST_S = 3600.0
"""The longest duration of a stream; then it ends, and the page opens another one."""

Check = Callable[[], Awaitable[object]]
Content = Mapping[str, Any]
"""The rows by kind: `status` is one row, every other kind a table of rows by id."""


class Listener:
    """One open stream. `messages` holds the messages to send. When the listener is dropped, None is added as the last
    one.
    """

    def __init__(self, team: str) -> None:
        self.team = team
        self.messages: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_QUEUED + 1)
        self.is_dropped = False

    def put(self, message: bytes) -> bool:
        """Adds a message. If too many messages wait already, drops the listener and returns False."""
        if self.messages.qsize() >= MOST_QUEUED:
            self.drop()
            return False
        self.messages.put_nowait(message)
        return True

    def drop(self) -> None:
        """Ends the listener's stream."""
        self.is_dropped = True
        self.messages.put_nowait(None)


class Streams:
    """Takes a picture of the page's state periodically while anyone listens. Sends the changes since the last picture
    to the listeners of each team.
    """

    def __init__(self, take: Callable[[], PagePicture], period_s: float = PERIOD_S) -> None:
        self._take, self._period_s = take, period_s
        self._limiter = CapacityLimiter(1)
        self._listeners: dict[Listener, None] = {}
        self._told: dict[str, Content] = {}
        """The rows that the listeners of each team have been sent."""
        self._loop: asyncio.Task[None] | None = None
        self._new = asyncio.Event()
        """Set while a listener has not been sent anything yet."""

    def join(self, team: str) -> Listener:
        """Adds a listener. The listener's first messages contain the whole picture. Raises QuotaError if there are too
        many listeners, and no team has more of them than this one.
        """
        if len(self._listeners) >= MOST_LISTENERS:
            of_team = Counter(each.team for each in self._listeners)
            largest, count = of_team.most_common(1)[0]
            if count <= of_team[team] + 1:
                raise QuotaError(f"{MOST_LISTENERS} pages are open already.", hint="Close one, and try again.")
            oldest = next(each for each in self._listeners if each.team == largest)
            oldest.drop()
            self.leave(oldest)
        listener = Listener(team)
        if (known := self._told.get(team)) is not None:
            for kind, content in known.items():
                listener.put(event(kind, _whole(kind, content)))
        else:
            self._new.set()
        self._listeners[listener] = None
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run(), name="page stream")
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)
        if not any(each.team == listener.team for each in self._listeners):
            self._told.pop(listener.team, None)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._listeners:
            begun_s = loop.time()
            self._new.clear()
            try:
                self._publish(await to_thread.run_sync(self._take, limiter=self._limiter))
            except Exception:
                _log.exception("the page's picture failed; it is taken again")
            with suppress(TimeoutError):
                left_s = max(self._period_s / 4, self._period_s - (loop.time() - begun_s))
                await asyncio.wait_for(self._new.wait(), left_s)

    def _publish(self, picture: PagePicture) -> None:
        for team in {listener.team for listener in self._listeners}:
            now, before = picture.seen_by(team), self._told.get(team)
            self._told[team] = now
            messages = [event(kind, change) for kind, change in changes(before, now).items()]
            for listener in [each for each in self._listeners if each.team == team]:
                if not all(listener.put(message) for message in messages):
                    self.leave(listener)


def changes(before: Content | None, now: Content) -> dict[str, Row]:
    """Returns the changes between two contents of the page, by table. Tables without a change are left out.

    A changed row consists of its changed fields only.
    """
    found: dict[str, Row] = {}
    for kind, content in now.items():
        if before is None:
            found[kind] = _whole(kind, content)
        elif kind == "status":
            if content != before[kind]:
                found[kind] = dict(content)
        elif change := _changed_rows(before[kind], content):
            found[kind] = change
    return found


def _whole(kind: str, content: Mapping[str, Any]) -> Row:
    return dict(content) if kind == "status" else {"all": True, "rows": dict(content)}


def _changed_rows(before: Mapping[str, Row], now: Mapping[str, Row]) -> Row:
    rows = {}
    for name, row in now.items():
        old = before.get(name)
        if old is None:
            rows[name] = row
        elif old != row:
            rows[name] = {field: value for field, value in row.items() if field not in old or old[field] != value}
    gone = [name for name in before if name not in now]
    if not rows and not gone:
        return {}
    return {"rows": rows, "gone": gone}


def event(kind: str, data: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'), allow_nan=False)}\n\n".encode()


class EventStream(Response):
    """The HTTP response (ASGI) with the live stream of one listener.

    It ends when the client leaves, when the client reads too slowly, after LONGEST_S seconds, or when the token of the
    client is no longer valid. The token is checked before each beat, and before a message if the last check was
    `beat_s` seconds ago.
    """

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, team: str, hello: Row, check: Check, beat_s: float = BEAT_S) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]  # of the empty body that it begins with
        self._streams, self._hello, self._check, self._beat_s = streams, hello, check, beat_s
        self._listener = streams.join(team)
        self._checked_s = asyncio.get_running_loop().time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_until_gone(receive))
        end = asyncio.get_running_loop().call_later(LONGEST_S, gone.cancel)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, event("hello", self._hello))
            while (message := await self._next(gone)) is not None:
                await self._send(send, message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            _log.info("a page that reads too slowly was dropped")
        finally:
            end.cancel()
            gone.cancel()
            self._streams.leave(self._listener)

    async def _next(self, gone: asyncio.Task[None]) -> bytes | None:
        """Returns the next message, or a beat after `beat_s` seconds without one; None once the stream ends."""
        waiting = asyncio.create_task(self._listener.messages.get())
        try:
            await asyncio.wait({waiting, gone}, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() or self._listener.is_dropped:
                return None
            message = waiting.result() if waiting.done() else None
        finally:
            waiting.cancel()
        now_s = asyncio.get_running_loop().time()
        if message is None or now_s - self._checked_s >= self._beat_s:
            try:
                await self._check()
            except RaytideError as error:
                _log.info("a page's token is not valid any more: %s", error)
                return None
            self._checked_s = now_s
        return message or b": beat\n\n"

    @staticmethod
    async def _send(send: Send, body: bytes) -> None:
        async with asyncio.timeout(SEND_S):
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
