"""Sends requests to hosted OpenAI-compatible APIs, and bills them at the prices in the endpoints' specs.

raytide replaces the model's name and the id in the response, and counts the tokens for the bill.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import httpx
from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from raytide.actors.engine.types import TokenUsage
from raytide.actors.serving.metrics import RequestTracker
from raytide.actors.serving.openai_api.admission import HEADERS, Grant, caller_of
from raytide.actors.serving.openai_api.errors import (
    RETRY_AFTER_S,
    ApiError,
    invalid,
    overloaded,
    timed_out,
    to_api_error,
)
from raytide.actors.serving.openai_api.respond import deadline_of
from raytide.actors.serving.protocols.responses_api.stored import PASSED_ON, PassedOn
from raytide.core.errors import EngineError, RaytideError
from raytide.core.objects.api_key import HostedBackend
from raytide.core.objects.cluster_config import HostedApi
from raytide.core.objects.endpoint import ADAPTER_SEPARATOR, ServeSpec
from raytide.gateway.tenancy.team_places import TeamPlaces

HOSTED = "hosted"
"""The value of `x-raytide-replica` in the response to a request that a hosted API answered."""
_CONNECT_S, _SILENCE_S = 10.0, 120.0
_ANSWER_S = 600.0
"""The longest wait for a whole answer, or for the first event of a stream: until then an API may send no byte."""
_MOST_CONNECTIONS = 1024
_MOST_ANSWER_BYTES, _MOST_ERROR_BYTES = 64 << 20, 16 << 10
_OURS = ("priority", "cache_salt", "timeout")
"""Fields that only raytide knows, which hosted APIs would refuse."""
_LIMITS = {
    "chat/completions": "max_completion_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
}
"""The field that limits the tokens of an answer, by the request's path."""
_TRANSLATED = ("messages", "messages/count_tokens", "responses/input_tokens", "tokenize", "detokenize")
"""Paths that an OpenAI-compatible API does not have."""
_IDS = {"chat/completions": "chatcmpl-", "completions": "cmpl-", "responses": "resp_"}
"""The prefix of an answer's id, by the request's path."""
_WHOLE = ("response.completed", "response.incomplete")
"""The events of a streamed response that contain all of it."""
_REFUSED = frozenset({400, 404, 409, 413, 415, 422})
_MOST_LINE_BYTES = 8 << 20
_DATA = b"data:"
_IMAGE_TOKENS = 1500
"""The tokens that an image in a prompt counts for. APIs bill an image by its size in pixels, not by the bytes of its
file.
"""


class UsageReader:
    """Reads one response of a hosted API, and counts its tokens.

    `usage` is the token usage that the API has reported. Until the API reports it, `usage` is an estimate: the given
    number of prompt tokens, and one generated token for each piece of text.
    """

    def __init__(self, model: str, prompt_tokens: int, *, shows_usage: bool, id: str = "") -> None:
        """`id` replaces the answer's id, so that the client and the usage records have the same id for the request."""
        self._model, self._prompt_tokens, self._shows_usage, self._id = model, prompt_tokens, shows_usage, id
        self._reported: TokenUsage | None = None
        self._pieces = 0
        self._rest = b""
        self.response: dict[str, Any] | None = None
        """The whole response, once it has come; only of the Responses API."""

    @property
    def usage(self) -> TokenUsage:
        return self._reported or TokenUsage(self._prompt_tokens, self._pieces)

    def whole(self, body: bytes) -> bytes:
        """Returns the body of an unstreamed response, with two changes: the model's name becomes this endpoint's name,
        and the answer's id becomes the constructor's `id`. Raises EngineError if the body is not a JSON object.
        """
        return json.dumps(self._read(_parsed(body))).encode()

    def events(self, piece: bytes) -> Iterator[bytes]:
        """Accepts the next bytes of a streamed response, and yields each line that they complete.

        In these lines, the model's name is replaced by this endpoint's name, and the answer's id is replaced by the
        constructor's `id`. If the client did not ask for the usage, an event that contains only the usage is left
        out. Raises EngineError for a malformed line.
        """
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
        whole = inner if answer.get("type") in _WHOLE else answer
        if isinstance(whole, dict) and isinstance(whole.get("id"), str) and isinstance(whole.get("output"), list):
            self.response = whole
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


class HostedApis:
    """The hosted APIs that the operator has allowed, with the API keys. Use it from one event loop."""

    def __init__(self, keys: Mapping[str, str], transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`keys` has the key of each API by its base URL; "" if the API has none."""
        self._keys, self._places = dict(keys), TeamPlaces(_MOST_CONNECTIONS)
        self._http = httpx.AsyncClient(
            transport=transport,
            trust_env=False,  # no ~/.netrc, no proxies
            timeout=httpx.Timeout(_SILENCE_S, connect=_CONNECT_S, read=_ANSWER_S),
            limits=httpx.Limits(max_connections=_MOST_CONNECTIONS),
        )

    @classmethod
    def from_environment(cls, allowed: Iterable[HostedApi]) -> HostedApis:
        """Returns the allowed APIs with the API keys from environment variables.

        Removes these variables from this process's environment.
        """
        apis = list(allowed)
        keys = {api.base_url: os.environ.get(api.api_key_env, "") for api in apis}
        for api in apis:
            os.environ.pop(api.api_key_env, None)
        return cls(keys)

    async def close(self) -> None:
        await self._http.aclose()

    async def answer(
        self,
        backend: HostedBackend,
        model: str,
        request: Request,
        track: RequestTracker,
        timeout_s: float | None = None,
    ) -> Response:
        """Returns the hosted API's response to a request, whole or as a stream. The response names `model` as its
        model.

        `timeout_s` is the timeout in the request's body. `track` counts the request when its response ends. It does not
        count a request for which this call raises an error.

        Raises ApiError if the caller is not admitted. Also raises ApiError if the hosted API refuses the request (with
        that API's own error), is full (429) or fails (503). Raises EngineError if the response is too large or not a
        JSON object.
        """
        if backend.base_url not in self._keys:
            raise _failed("is not among the hosted APIs of this cluster")
        path = _path(request)
        if path in _TRANSLATED:
            raise invalid(f"{model} is a hosted model, which has no /{path}: use chat/completions.", param="model")
        asked, passed_on = dict(await request.json()), request.scope.get(PASSED_ON, PassedOn(None, None))
        if passed_on.input is not None:  # the API does not have the responses that are stored here
            asked["input"] = passed_on.input
            asked.pop("previous_response_id", None)
        deadline_s = deadline_of(timeout_s, request)
        body, most = _body(backend, path, asked)
        most_prompt, likely_prompt = _prompt_tokens(body)
        caller, place = caller_of(request.scope), ExitStack()
        grant = await caller.admit(model, most_prompt, most, price=backend.price)
        version = f"{HOSTED}:{backend.model}"
        try:
            place.enter_context(self._places.held(caller.team))
            options = asked.get("stream_options")
            shows_usage = isinstance(options, dict) and bool(options.get("include_usage"))
            found = await self._send(backend, path, body)
            id = f"{_IDS[path]}{grant.id}" if grant.id and path in _IDS else ""
            reader = UsageReader(model, likely_prompt, shows_usage=shows_usage, id=id)
            request.scope[HEADERS] = {**grant.headers(), "x-raytide-replica": HOSTED}
            if asked.get("stream"):
                return _RelayedStream(found, reader, grant, version, track, deadline_s, passed_on.keep, place.close)
            content = reader.whole(await _read(found, _MOST_ANSWER_BYTES))
        except BaseException as error:
            place.close()
            status = to_api_error(error).status if isinstance(error, Exception) else 499
            grant.settle(None, status, version=version)
            if not isinstance(error, Exception):
                track.finish("aborted")
            if isinstance(error, httpx.HTTPError):
                raise _failed(f"does not answer ({type(error).__name__})") from None
            raise
        place.close()
        grant.settle(reader.usage, 200, version=version)
        track.finish("ok")
        if passed_on.keep is not None and reader.response is not None:
            await passed_on.keep(reader.response)
        request.scope[HEADERS] = {**grant.headers(), "x-raytide-replica": HOSTED}
        return Response(content, media_type="application/json")

    async def _send(self, backend: HostedBackend, path: str, body: Mapping[str, Any]) -> httpx.Response:
        key = self._keys[backend.base_url]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"{backend.base_url.rstrip('/')}/{path}"
        found = await self._http.send(self._http.build_request("POST", url, json=body, headers=headers), stream=True)
        if found.status_code == 200:
            return found
        raise _error(found, await _read(found, _MOST_ERROR_BYTES))


def fallback_of(spec: ServeSpec, model: str, request: Request) -> HostedBackend | None:
    """Returns the hosted API that answers a request if no replica does. Returns None if the endpoint has no fallback,
    if the model is an adapter, or if hosted APIs lack the request's route.
    """
    return None if ADAPTER_SEPARATOR in model or _path(request) in _TRANSLATED else spec.fallback


def _path(request: Request) -> str:
    return request.url.path.removeprefix("/v1").strip("/")


def _body(backend: HostedBackend, path: str, asked: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the body for the API, and the most tokens of the answer. The body always contains this limit."""
    body = {name: value for name, value in asked.items() if name not in _OURS} | {"model": backend.model}
    most = 0
    if limit := _LIMITS.get(path):
        given = [asked[name] for name in (limit, "max_tokens") if isinstance(asked.get(name), int)]
        body.pop("max_tokens", None)
        body[limit] = min([*given[:1], backend.max_tokens])
        samples = max(asked.get(name) or 1 for name in ("n", "best_of"))
        prompts = asked.get("prompt")
        count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        most = body[limit] * samples * count
        if asked.get("stream") and path != "responses":
            body["stream_options"] = {**(asked.get("stream_options") or {}), "include_usage": True}
    return body, most


def _prompt_tokens(body: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the most tokens that a body's prompt can have, and the number to bill if the API does not report it."""
    urls = list(_image_urls(body))
    text, images = len(json.dumps(body)) - sum(map(len, urls)), len(urls) * _IMAGE_TOKENS
    return text + images, text // 4 + images  # a token has a byte at least


def _image_urls(body: Mapping[str, Any]) -> Iterator[str]:
    """Yields the data URLs of the images in messages. Elsewhere, in a tool's schema for example, a URL is text."""
    for message in (*_objects(body.get("messages")), *_objects(body.get("input"))):
        for part in _objects(message.get("content")):
            if part.get("type") in ("image_url", "input_image"):
                image = part.get("image_url")
                url = image.get("url") if isinstance(image, dict) else image
                if isinstance(url, str) and url[:11].lower() == "data:image/":
                    yield url


def _objects(found: object) -> Iterator[dict[str, Any]]:
    return (each for each in (found if isinstance(found, list) else ()) if isinstance(each, dict))


class _RelayedStream(StreamingResponse):
    """The events of a hosted stream. The request is billed and the stream closed however it ends, even if the client
    left before it started. `deadline_s` is the moment at which the request gives up, `keep` stores the response, and
    `leave` is called at the end.
    """

    def __init__(
        self,
        found: httpx.Response,
        reader: UsageReader,
        grant: Grant,
        version: str,
        track: RequestTracker,
        deadline_s: float | None = None,
        keep: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._found, self._reader, self._grant, self._version = found, reader, grant, version
        self._status, self._track, self._keep, self._leave = 499, track, keep, leave
        self._deadline_s = math.inf if deadline_s is None else deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._grant.settle(self._reader.usage, self._status, version=self._version)
            self._track.finish("aborted")  # unless it was answered or has failed
            self._leave()
            with suppress(httpx.HTTPError):
                await asyncio.shield(self._found.aclose())

    async def _events(self) -> AsyncIterator[bytes]:
        pieces, silence_s = self._found.aiter_bytes(), _ANSWER_S
        try:
            while piece := await asyncio.wait_for(anext(pieces, b""), min(silence_s, self._left_s())):
                for event in self._reader.events(piece):
                    self._track.first_token()
                    silence_s = _SILENCE_S
                    if self._keep is not None and self._reader.response is not None:
                        await self._keep(self._reader.response)
                        self._keep = None
                    yield event
            self._status = 200
            self._track.finish("ok")
        except (httpx.HTTPError, RaytideError, TimeoutError) as error:
            failure = timed_out() if round(self._left_s(), 3) <= 0 else _failed(f"broke off ({type(error).__name__})")
            self._status = failure.status
            self._track.finish("error", failure.body.error.code or "")
            yield b"data: " + failure.body.model_dump_json().encode() + b"\n\n"

    def _left_s(self) -> float:
        """Returns the seconds until the request's own timeout."""
        return self._deadline_s - asyncio.get_running_loop().time()


async def _read(found: httpx.Response, most: int) -> bytes:
    """Reads an answer of at most `most` bytes."""
    whole = bytearray()
    try:
        async for piece in found.aiter_bytes():
            whole += piece
            if len(whole) > most:
                raise EngineError("the hosted API's answer is too large.")
    finally:
        await found.aclose()
    return bytes(whole)


def _error(found: httpx.Response, body: bytes) -> ApiError:
    """Returns an API's error as an ApiError. A wrong key is the operator's fault, so that error is not shown to the
    client.
    """
    if found.status_code == 429:
        return overloaded(f"The hosted API is full. Retry in {RETRY_AFTER_S} s.")
    if found.status_code not in _REFUSED:
        return _failed(f"answered with status {found.status_code}")
    try:
        told = json.loads(body)["error"]
        message, param = str(told["message"]), told.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param = "The hosted API refused the request.", None
    if found.status_code == 404:
        return _failed("does not know the model")
    return invalid(message, param=str(param) if param else None, status=found.status_code)


def _failed(why: str) -> ApiError:
    return ApiError(503, f"The hosted API {why}.", type="server_error", code="hosted_api")
