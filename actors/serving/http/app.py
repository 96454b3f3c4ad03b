"""OpenAI's HTTP routes as a FastAPI app: for one engine under plain uvicorn, and for all endpoints in the gateway."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from raytide.actors.serving.http.body import JsonRoute
from raytide.actors.serving.http.headers import ResponseHeaders
from raytide.actors.serving.metrics import engine_samples
from raytide.actors.serving.openai_api.admission import RequestCaller, caller_of
from raytide.actors.serving.openai_api.chat.tool_choice import ToolUse
from raytide.actors.serving.openai_api.errors import ApiError, ErrorBody, invalid, to_api_error, validation_error
from raytide.actors.serving.openai_api.pooling.embeddings import EmbeddingList, EmbeddingRequest, embed
from raytide.actors.serving.openai_api.pooling.scores import (
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    rerank,
    score,
)
from raytide.actors.serving.openai_api.respond import failed, respond
from raytide.actors.serving.openai_api.response_writer import ChatWriter, CompletionWriter
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
)
from raytide.actors.serving.responses_api.request import ResponsesRequest, chat_request, in_responses
from raytide.actors.serving.responses_api.writer import ResponsesWriter
from raytide.core.errors import RaytideError
from raytide.core.telemetry.metrics import CONTENT_TYPE, render

T = TypeVar("T")
B = TypeVar("B", EmbeddingRequest, ScoreRequest, RerankRequest)
_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_API = re.compile(r"/v[12]/([^/]*)")
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Answers that may be streamed, beside JSON."""


class Models(Protocol):
    """The models that an app serves: one engine's, or all endpoints of a cluster."""

    async def server(self, model: str, request: Request, body: BaseModel | None = None) -> Server:
        """Returns the server of a model. Raises ApiError for one that is unknown or that this caller may not use."""

    async def answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        """Returns what a server of the model responds; another one may be asked when the first one fails."""

    def cards(self, request: Request) -> list[Model]:
        """Returns the models that this caller may use."""

    def count_refused_body(self, api: str) -> None:
        """Counts a request that was refused before its model was known."""


class SingleModel:
    """One server, in the process of its engine."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def server(self, model: str, request: Request, body: BaseModel | None = None) -> Server:
        self._server.check_name(model)
        return self._server

    async def answer(
        self, model: str, request: Request, body: BaseModel, respond: Callable[[Server], Awaitable[T]]
    ) -> T:
        return await respond(await self.server(model, request))

    def cards(self, request: Request) -> list[Model]:
        return [self._server.card(self._server.model)]

    def count_refused_body(self, api: str) -> None:
        self._server.metrics.count_outcome(api, "invalid")


def create_app(server: Server, *, owns_server: bool = True) -> FastAPI:
    """Returns the ASGI app of one model. With `owns_server` the app starts and stops the server with its own lifespan;
    else the caller does.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if owns_server:
            await server.start()
        yield
        if owns_server:
            await server.stop()

    app = openai_app(SingleModel(server), lifespan)
    app.add_middleware(ResponseHeaders, replica=server.replica)

    @app.get("/health")
    async def health() -> Response:
        problem = await server.problem()
        return JSONResponse({"status": problem or "ok"}, status_code=503 if problem else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        stats = await server.engine.stats()
        text = render([*server.metrics.samples(), *engine_samples(stats, server.model)])
        return Response(text, media_type=CONTENT_TYPE)

    return app


def openai_app(models: Models, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """Returns an app with OpenAI's routes and errors for these models."""
    app = FastAPI(
        title="raytide",
        lifespan=lifespan,
        redirect_slashes=False,  # to a host that the client names
        responses={status: {"model": ErrorBody} for status in _ERRORS},
    )
    app.router.route_class = JsonRoute
    _add_error_handlers(app, models)

    @app.get("/v1/models")
    async def list_models(request: Request) -> ModelList:
        return ModelList(data=models.cards(request))

    @app.get("/v1/models/{model}")
    async def model_card(model: str, request: Request) -> Model:
        return (await models.server(model, request)).card(model)

    @app.post("/v1/completions", response_model=Completion, responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        def writer_of(_: ToolUse) -> CompletionWriter:
            return CompletionWriter(body.model, includes_usage=body.includes_usage)

        def answer(server: Server) -> Awaitable[Response]:
            return respond(server, "completions", body, request, writer_of)

        return await models.answer(body.model, request, body, answer)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAM)
    async def chat(body: ChatRequest, request: Request) -> Response:
        writer_of = partial(ChatWriter, body.model, includes_usage=body.includes_usage)

        def answer(server: Server) -> Awaitable[Response]:
            return respond(server, "chat", body, request, writer_of)

        return await models.answer(body.model, request, body, answer)

    @app.post("/v1/responses", responses=_STREAM)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        await models.server(body.model, request)  # an unknown model is the first problem to name
        try:
            chat = chat_request(body)
        except ValidationError as error:
            raise in_responses(
                validation_error([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
            ) from error

        async def answer(server: Server) -> Response:
            try:
                return await respond(server, "responses", chat, request, partial(ResponsesWriter, body))
            except ApiError as error:
                raise in_responses(error) from error

        return await models.answer(body.model, request, chat, answer)

    _add_pooling_routes(app, models)
    return app


def _add_pooling_routes(app: FastAPI, models: Models) -> None:
    async def tracked(
        api: str, body: B, request: Request, work: Callable[[Server, B, RequestCaller], Awaitable[T]]
    ) -> T:
        async def answer(server: Server) -> T:
            track = server.metrics.track(api)
            try:
                found = await work(server, body, caller_of(request.scope))
            except Exception as error:
                raise failed(error, track) from error
            track.finish("ok")
            return found

        return await models.answer(body.model, request, body, answer)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> EmbeddingList:
        return await tracked("embeddings", body, request, embed)

    @app.post("/v1/score")
    async def scores(body: ScoreRequest, request: Request) -> ScoreList:
        return await tracked("score", body, request, score)

    @app.post("/v1/rerank")
    @app.post("/v2/rerank", include_in_schema=False)  # where Cohere's newer clients ask
    async def ranking(body: RerankRequest, request: Request) -> Ranking:
        return await tracked("rerank", body, request, rerank)


def _add_error_handlers(app: FastAPI, models: Models) -> None:
    def count_refused_body(path: str) -> None:
        models.count_refused_body(api_of(path))

    app.state.count_refused_body = count_refused_body

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> Response:
        count_refused_body(request.url.path)
        return error_response(validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        response = error_response(invalid(message, param=None, status=error.status_code))
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(_allowed_methods(request))
        return response

    async def internal(_: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    for kind in (ApiError, RaytideError, Exception):
        app.add_exception_handler(kind, internal)


def _allowed_methods(request: Request) -> list[str]:
    """Returns the methods of all routes with this path; Starlette names those of the first one alone."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    found = {
        each for route in routes if route.matches(request.scope)[0] is not Match.NONE for each in route.methods or ()
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


def api_of(path: str) -> str:
    """Returns the API that a path names, such as `chat`; empty if it names none."""
    found = _API.search(path)
    return found[1] if found is not None else ""


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body.model_dump(), status_code=error.status, headers=error.headers)
