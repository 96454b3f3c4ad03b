"""OpenAI's HTTP routes as a FastAPI app. The app serves one engine under plain uvicorn, or all endpoints in the
gateway.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from raytide.actors.serving.http.body import JsonRoute
from raytide.actors.serving.http.headers import REQUEST_ID, ResponseHeaders
from raytide.actors.serving.metrics import engine_samples
from raytide.actors.serving.openai_api.answers.bodies import ChatCompletion, Completion, Model, ModelList
from raytide.actors.serving.openai_api.answers.writer import ChatWriter, CompletionWriter
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
from raytide.actors.serving.openai_api.respond import respond
from raytide.actors.serving.openai_api.server import Server
from raytide.actors.serving.openai_api.wire import ChatRequest, CompletionRequest
from raytide.actors.serving.protocols.messages_api.errors import error_body, is_anthropic
from raytide.actors.serving.protocols.messages_api.routes import add_messages_routes, model_info, model_page
from raytide.actors.serving.protocols.models import Models, SingleModel, tracked
from raytide.actors.serving.protocols.responses_api.routes import add_responses_routes
from raytide.actors.serving.protocols.responses_api.stored import MemoryResponses, ResponseStore
from raytide.actors.serving.protocols.tokens import add_token_routes
from raytide.core.errors import RaytideError
from raytide.core.telemetry.metrics import CONTENT_TYPE, render

_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_API = re.compile(r"^/(?:v[12]/)?([^/]*)")
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""Answers that may be streamed, beside JSON."""


class _Name(StringConvertor):
    """A model's name in a path; it may contain slashes."""

    regex = ".+"


register_url_convertor("name", _Name())


class Version(BaseModel):
    version: str


def create_app(server: Server, *, owns_server: bool = True) -> FastAPI:
    """Returns the ASGI app of one model. With `owns_server`, the app's lifespan starts and stops the server. Otherwise
    the caller starts and stops the server.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if owns_server:
            await server.start()
        yield
        if owns_server:
            await server.stop()

    app = openai_app(SingleModel(server), lifespan)
    app.add_middleware(ResponseHeaders, replica="local")

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


def openai_app(
    models: Models,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]],
    responses: ResponseStore | None = None,
) -> FastAPI:
    """Returns an app with OpenAI's routes and errors for `models`. `responses` stores the objects of the Responses API,
    by default in this process's memory.
    """
    app = FastAPI(
        title="raytide",
        lifespan=lifespan,
        redirect_slashes=False,  # to a host that the client names
        responses={status: {"model": ErrorBody} for status in _ERRORS},
    )
    app.router.route_class = JsonRoute
    _add_error_handlers(app, models)

    @app.get("/v1/models", response_model=ModelList)
    async def list_models(request: Request) -> ModelList | Response:
        cards = models.cards(request)
        return JSONResponse(model_page(cards)) if is_anthropic(request.scope) else ModelList(data=cards)

    @app.get("/v1/models/{model:name}", response_model=Model)
    async def model_card(model: str, request: Request) -> Model | Response:
        card = (await models.server(model, request)).card(model)
        return JSONResponse(model_info(card)) if is_anthropic(request.scope) else card

    @app.post("/v1/completions", response_model=Completion, responses=_STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        writer_of = partial(CompletionWriter, body)
        return await models.answer(
            body.model, request, body, lambda server: respond(server, "completions", body, request, writer_of)
        )

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAM)
    async def chat(body: ChatRequest, request: Request) -> Response:
        writer_of = partial(ChatWriter, body)
        return await models.answer(
            body.model, request, body, lambda server: respond(server, "chat", body, request, writer_of)
        )

    add_responses_routes(app, models, responses or MemoryResponses())
    add_messages_routes(app, models)
    add_token_routes(app, models)
    _add_pooling_routes(app, models)

    @app.get("/version")
    async def installed() -> Version:
        return Version(version=version("raytide"))

    return app


def _add_pooling_routes(app: FastAPI, models: Models) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> EmbeddingList:
        return await tracked(models, "embeddings", body.model, body, request, embed)

    @app.post("/v1/score")
    @app.post("/score", include_in_schema=False)  # as at vLLM, like /rerank
    async def scores(body: ScoreRequest, request: Request) -> ScoreList:
        return await tracked(models, "score", body.model, body, request, score)

    @app.post("/v1/rerank")
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)  # where Cohere's newer clients ask
    async def ranking(body: RerankRequest, request: Request) -> Ranking:
        return await tracked(models, "rerank", body.model, body, request, rerank)


def _add_error_handlers(app: FastAPI, models: Models) -> None:
    def count_refused_body(path: str) -> None:
        models.count_refused_body(api_of(path))

    app.state.count_refused_body = count_refused_body

    @app.exception_handler(RequestValidationError)
    async def bad_body(request: Request, error: RequestValidationError) -> Response:
        count_refused_body(request.url.path)
        return error_response(validation_error(error.errors()), request.scope)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        response = error_response(invalid(message, param=None, status=error.status_code), request.scope)
        if error.status_code == 405:
            response.headers["allow"] = ", ".join(_allowed_methods(request))
        return response

    async def internal(request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error), request.scope)

    for kind in (ApiError, RaytideError, Exception):
        app.add_exception_handler(kind, internal)


def _allowed_methods(request: Request) -> list[str]:
    """Returns the methods of all routes that match this path; Starlette has only those of the first one."""
    routes = [each for each in request.app.routes if isinstance(each, Route)]
    found = {
        each for route in routes if route.matches(request.scope)[0] is not Match.NONE for each in route.methods or ()
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


def api_of(path: str) -> str:
    """Returns the name under which metrics count the requests to a path: the path's first segment after the version,
    such as `chat`.
    """
    found = _API.search(path)
    return found[1] if found is not None else ""


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the error in the format of Anthropic's API for requests of that API, and in OpenAI's format for all
    others.
    """
    body = error_body(error, scope.get(REQUEST_ID, "")) if is_anthropic(scope) else error.body.model_dump()
    return JSONResponse(body, status_code=error.status, headers=error.headers)
