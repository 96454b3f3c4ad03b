"""Turns a generation into an HTTP response, whole or streamed. Cancels the generation when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from raytide.actors.engine.limits import MAX_LOGPROB_ENTRIES, MAX_NAME_CHARS, MAX_TIMEOUT_S
from raytide.actors.engine.text.worker_pool import TextPool
from raytide.actors.engine.types import TokenUsage
from raytide.actors.serving.metrics import Outcome, RequestTracker
from raytide.actors.serving.openai_api.admission import HEADERS, caller_of
from raytide.actors.serving.openai_api.answers.writer import ChoiceState, ResponseWriter, usage_of
from raytide.actors.serving.openai_api.errors import ApiError, client_gone, invalid, timed_out, to_api_error
from raytide.actors.serving.openai_api.generation import ChoiceDelta, GenerationStream
from raytide.actors.serving.openai_api.logprobs import TokenBytes
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest, CompletionRequest
from raytide.actors.serving.request_trace import RequestTrace
from raytide.core.errors import OverloadedError, RaytideError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

TIMEOUT = "x-raytide-timeout-s"
"""The header with the seconds after which a request is given up."""
PROBE = "x-raytide-probe"
"""The header of probes, which are counted apart from users' requests."""
SESSION = "x-session-id"
"""The header that names a session. Requests of one session go to the same replica if that is sensible."""
_BEGAN = "raytide.began_s"
"""The key of the ASGI scope with the time of the first try. Timeouts count from it, also if another server answers."""
_TIMED_OUT = 504
KEPT = "cache"
"""The replica's name in answers that come from a router's cache."""
_MANY_ENTRIES = 1000
"""The number of log probabilities above which they are formatted in a thread, since that takes milliseconds."""


async def respond(
    server: Server,
    api: str,
    body: CompletionRequest | ChatRequest,
    request: Request,
    writer_of: Callable[[GenerationStream], ResponseWriter],
    keep: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Returns the HTTP response to `body`.

    `writer_of` makes the answer's writer from the generation. Metrics count the request under the name `api`. `keep` is
    called when the answer is complete, before the end of the answer is sent to the client.
    """
    track = server.metrics.track("probe" if PROBE in request.headers else api)
    if (trace := RequestTrace.of(request.scope)) is not None:
        trace.model = body.model
    leaving = asyncio.ensure_future(_until_disconnect(request.receive))
    try:
        deadline_s = deadline_of(body.timeout, request)
        generating = server.generate(body, caller_of(request.scope), session_of(body, request.headers))
        generation = await _unless_gone(leaving, _in_time(deadline_s, generating))
        reading = _Reading(generation, track, server.version or server.info.weights_version, deadline_s, trace)
        try:
            writer = writer_of(generation)
            if generation.grant is not None and generation.grant.id:
                writer.set_id(generation.grant.id)
            if body.stream:
                # The first tokens come before the headers, so that a refusal still has an HTTP status of its own.
                first = await _unless_gone(leaving, reading.next())
                _leave_headers(request, generation)
                events = _events(reading, first, writer, server.texts, keep)
                return _EventStream(events, reading.close)
            await _unless_gone(leaving, reading.to_the_end())

            def render_response() -> Response:
                usage = usage_of(reading.choices)
                answer = writer.full_response(reading.choices, usage, generation.token_bytes)
                return JSONResponse(answer if isinstance(answer, dict) else answer.model_dump())

            response = await server.texts.run(render_response) if reading.entries > _MANY_ENTRIES else render_response()
            reading.finish("ok", 200)
            if keep is not None:
                await keep()
            _leave_headers(request, generation)
            return response
        except _ClientGoneError:
            reading.close()
            raise
        except BaseException as error:
            generation.cancel()
            reading.settle(to_api_error(error).status if isinstance(error, Exception) else 499, error)
            raise
    except _ClientGoneError:
        track.finish("aborted")
        return Response(status_code=499)
    except asyncio.CancelledError:
        track.finish("aborted")
        raise
    except Exception as error:
        raise failed(error, track) from error
    finally:
        leaving.cancel()


def deadline_of(timeout_s: float | None, request: Request) -> float | None:
    """Returns the moment, on the event loop's clock, at which the request gives up; None for no limit. The body's
    timeout (seconds) takes precedence over the header.
    """
    if timeout_s is None and (text := request.headers.get(TIMEOUT)) is not None:
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise invalid(f"The header {TIMEOUT} is {text!r}; it takes seconds, up to {MAX_TIMEOUT_S}.", param=None)
    began_s: float = request.scope.setdefault(_BEGAN, asyncio.get_running_loop().time())
    return None if timeout_s is None else began_s + timeout_s


def session_of(body: BaseModel, headers: Mapping[str, str]) -> str:
    """Returns the session that a request names in a header or in one of OpenAI's fields. Returns an empty string if the
    request names none.
    """
    fields = body.model_extra or {}
    named = (headers.get(SESSION), *(fields.get(name) for name in ("prompt_cache_key", "session_id", "user")))
    return next((each[:MAX_NAME_CHARS] for each in named if isinstance(each, str) and each), "")


def _leave_headers(request: Request, generation: GenerationStream) -> None:
    """Stores the response's headers in the scope, from which a middleware writes them."""
    headers = {} if generation.grant is None else generation.grant.headers()
    if generation.replica:
        headers["x-raytide-replica"] = generation.replica
    if generation.replica == KEPT:
        headers["x-raytide-cache"] = "hit"
    request.scope[HEADERS] = headers


class _Reading:
    """Reads a generation, collects its choices, and reports the end to metrics, trace and billing."""

    def __init__(
        self,
        generation: GenerationStream,
        track: RequestTracker,
        version: str,
        deadline_s: float | None,
        trace: RequestTrace | None,
    ) -> None:
        self.choices = [ChoiceState() for _ in range(generation.choices)]
        self.track = track
        self.token_bytes = generation.token_bytes
        self.entries = 0
        self._tokens = 0
        self._generation, self._version, self._deadline_s = generation, version, deadline_s
        self._batches = generation.batches()
        self._trace = trace

    async def next(self) -> list[ChoiceDelta]:
        """Returns the next batch; empty at the end. Raises ApiError at the request's deadline."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                batch: list[ChoiceDelta] = await anext(self._batches, [])
        except TimeoutError:
            self._generation.cancel()
            raise timed_out() from None
        for delta in batch:
            self.choices[delta.index].add(delta)
            self._tokens += len(delta.token_ids)
            self.track.tokens(delta.index, len(delta.token_ids))
        return batch

    def finish(self, outcome: Outcome, status: int) -> None:
        self.track.finish(outcome)
        if outcome == "ok":
            kept = self._generation.replica == KEPT
            reasons = [choice.finish_reason for choice in self.choices]
            timings = [] if kept else self._generation.timings
            self.track.ended(reasons, timings, self._generation.prompt_tokens, self._tokens)
        self.settle(status)

    def settle(self, status: int, error: BaseException | None = None) -> None:
        """Bills the tokens so far. A request that the server has failed costs nothing, nor does one that the engine or
        the router has refused before its first token.
        """
        cached = sum(choice.usage.cached_tokens for choice in self.choices if choice.usage is not None)
        counted = sum(choice.usage.completion_tokens for choice in self.choices if choice.usage is not None)
        generated = max(self._tokens, counted)  # `best_of` generates more than it sends
        usage = TokenUsage(self._generation.prompt_tokens, generated, cached)
        if self._trace is not None:
            reasons = [choice.finish_reason for choice in self.choices]
            self._trace.ended(usage, reasons, self._generation.replica, self._generation.timings)
        if self._generation.grant is not None:
            is_billed = status < 500 or status == _TIMED_OUT
            if isinstance(error, RaytideError):  # a timeout that the request has not asked for is one, too
                is_billed = self._tokens > 0 and error.http_status < 500
            self._generation.grant.settle(usage if is_billed else None, status, version=self._version)

    async def to_the_end(self) -> None:
        """Reads the whole generation. Raises ApiError if the answer becomes too large to be sent in one piece."""
        while batch := await self.next():
            self.entries += sum(map(_entries, batch))
            if self.entries > MAX_LOGPROB_ENTRIES:
                raise invalid(
                    f"The answer has more than {MAX_LOGPROB_ENTRIES} log probabilities: stream it, or ask for fewer.",
                    param="logprobs",
                )

    def close(self) -> None:
        """Cancels the generation. If it has not finished, its client has left, and it counts as aborted."""
        self._generation.cancel()
        self.finish("aborted", 499)


def _entries(delta: ChoiceDelta) -> int:
    scored = (*delta.logprobs, *delta.prompt_logprobs)
    return sum(1 + len(figures.top) for _, figures in scored if figures is not None)


async def _events(
    reading: _Reading,
    first: list[ChoiceDelta],
    writer: ResponseWriter,
    texts: TextPool,
    keep: Callable[[], Awaitable[None]] | None,
) -> AsyncIterator[bytes]:
    """Yields the body of a stream: the writer's events for each batch of deltas, then its end or an error."""
    try:
        batch, head = first, writer.opening(len(reading.choices))
        while batch:
            render = partial(_rendered, writer, batch, reading.token_bytes)
            many = (
                any(delta.logprobs or delta.prompt_logprobs for delta in batch)
                and sum(map(_entries, batch)) > _MANY_ENTRIES
            )
            yield head + (await texts.run(render) if many else render())
            batch, head = await reading.next(), b""
        reading.finish("ok", 200)
        closing = writer.closing(usage_of(reading.choices))
        if keep is not None:
            await keep()
        yield closing
    except Exception as error:
        api_error = failed(error, reading.track)
        reading.settle(api_error.status, error)
        yield writer.failure(api_error)


def _rendered(writer: ResponseWriter, batch: list[ChoiceDelta], bytes_of: TokenBytes) -> bytes:
    return b"".join(writer.chunk(delta, bytes_of) for delta in batch)


class _EventStream(Response):
    """A streaming response of server-sent events.

    Calls `on_close` however the stream ends, also when the client disconnects before the first byte. Starlette's own
    streaming response takes twice as long per stream, since it creates a task group for each.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.current_task()
        assert sending is not None
        leaving = asyncio.ensure_future(_until_disconnect(receive))
        leaving.add_done_callback(lambda left: None if left.cancelled() else sending.cancel())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if leaving.cancelled() or not leaving.done() or sending.uncancel():
                raise  # it was not the client that left
        finally:
            leaving.cancel()
            self._on_close()


class _ClientGoneError(Exception):
    pass


async def _unless_gone(leaving: asyncio.Future[None], work: Coroutine[None, None, _T]) -> _T:
    """Returns the result of `work`. Raises _ClientGoneError as soon as the client closes its connection."""
    working = asyncio.ensure_future(work)
    try:
        both: set[asyncio.Future[Any]] = {working, leaving}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _ClientGoneError
    finally:
        working.cancel()


async def _in_time(deadline_s: float | None, work: Coroutine[None, None, _T]) -> _T:
    """Returns the result of `work`. Raises ApiError at the request's deadline."""
    try:
        async with asyncio.timeout_at(deadline_s):
            return await work
    except TimeoutError:
        raise timed_out() from None


async def in_request(request: Request, body: BaseModel | None, work: Coroutine[None, None, _T]) -> _T:
    """Awaits `work` and returns its result. Use it for requests whose answer is not streamed. Raises ApiError at the
    request's deadline, or as soon as the client closes its connection.
    """
    leaving = asyncio.ensure_future(_until_disconnect(request.receive))
    try:
        timeout_s = getattr(body, "timeout", None)
        return await _unless_gone(leaving, _in_time(deadline_of(timeout_s, request), work))
    except _ClientGoneError:
        raise client_gone() from None
    finally:
        leaving.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def failed(error: Exception, track: RequestTracker) -> ApiError:
    """Counts the failure of a request and returns the error as an API error. Logs the error only if the server is at
    fault.
    """
    api_error = to_api_error(error)
    outcome = outcome_of(error)
    if outcome == "error" and api_error.status != _TIMED_OUT:  # the client has asked for its timeout
        _log.error("a request failed", exc_info=error)
    track.finish(outcome, api_error.body.error.code or "")
    api_error.is_counted = True
    return api_error


def outcome_of(error: Exception) -> Outcome:
    """Returns the outcome under which metrics count a failure. It is `limited` if the caller's key exceeds a limit,
    `rejected` if the queue is full, `invalid` for other client errors, and `error` for server errors.
    """
    status = to_api_error(error).status
    if isinstance(error, OverloadedError):
        return "rejected"
    return "limited" if status == 429 else "invalid" if status < 500 else "error"
