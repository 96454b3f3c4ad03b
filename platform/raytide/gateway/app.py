"""The gateway's HTTP app. It has OpenAI's routes for all endpoints. A request names its endpoint as `model`, or by a
path that contains the endpoint's name.

The app's middleware identifies the sender of a request before the body is read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from raytide.actors.serving.http.app import error_response, openai_app
from raytide.actors.serving.http.headers import ResponseHeaders
from raytide.actors.serving.openai_api.admission import CALLER
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.actors.serving.protocols.responses_api.stored import ResponseStore
from raytide.core.telemetry.metrics import CONTENT_TYPE, render
from raytide.gateway.models import ENDPOINT, EndpointModels
from raytide.gateway.rollouts.feedback import add_feedback_routes
from raytide.gateway.tenancy.tenancy import Tenancy
from raytide.gateway.tracing import RequestTracing, TracedRequests

_OWN = frozenset({"v1", "v2", "health", "metrics", "docs", "openapi.json", "redoc"})
_BARE = frozenset({"tokenize", "detokenize", "score", "rerank", "version"})
"""Routes without a version prefix and without subroutes, so that endpoints may have the same names."""
_LOCAL_ORIGIN = r"(app|file|tauri|vscode-(file|webview))://.*|https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""The origins on the browser's own machine. Pages from other origins must not use a gateway that requires no keys."""
_CLOSED = ("/v1/", "/v2/", "/metrics", "/tokenize", "/detokenize", "/score", "/rerank")


def create_app(
    models: EndpointModels,
    tenancy: Tenancy,
    start: Callable[[], AsyncIterator[None]],
    tracing: RequestTracing | None = None,
    responses: ResponseStore | None = None,
) -> FastAPI:
    """Returns the HTTP app. `start` is a context that is entered before the first request and left after the last one.
    If `responses` is None, each process stores its responses separately."""
    app = openai_app(models, asynccontextmanager(lambda _: start()), responses)
    app.add_middleware(Authentication, tenancy=tenancy)
    if tracing is not None:
        app.add_middleware(TracedRequests, tracing=tracing)
    app.add_middleware(EndpointPaths)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"] if tenancy.requires_keys else [],
        allow_origin_regex=_LOCAL_ORIGIN,
        allow_private_network=tenancy.requires_keys,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["*"],
    )
    app.add_middleware(ResponseHeaders, replica="")

    add_feedback_routes(app, tenancy.api, lambda request: str(request.scope.get(ENDPOINT) or ""))

    @app.get("/health")
    async def health(request: Request) -> Response:
        name = request.scope.get(ENDPOINT)
        if name is not None and not models.endpoint(name)[1].ready:
            return JSONResponse({"status": f"no replica of {name} takes requests"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        return Response(render(await models.endpoint_samples(request)), media_type=CONTENT_TYPE)

    return app


class EndpointPaths:
    """Middleware that serves `/NAME/v1/...` as `/v1/...`, restricted to the endpoint NAME. Other routes, such as
    `/NAME/health`, work in the same way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            _, _, path = scope["path"].partition("/")
            name, _, rest = path.partition("/")
            if name not in _OWN and rest.partition("/")[0] in _OWN | _BARE:
                scope.update({"path": f"/{rest}", "raw_path": f"/{rest}".encode(), ENDPOINT: name})
        await self._app(scope, receive, send)


class Authentication:
    """Middleware that authenticates requests for `/v1/...`, `/v2/...`, `/metrics`, and for those routes of vLLM that
    compute, such as `/tokenize`.

    A request without a valid key is refused, with an error in the format of OpenAI or Anthropic. Requests for other
    paths, such as `/health`, need no key. This process also sends the rows of batches as requests. These requests
    need no key, because their caller is known already. This middleware must be inside EndpointPaths, which takes the
    endpoint's name from the path.
    """

    def __init__(self, app: ASGIApp, tenancy: Tenancy) -> None:
        self._app, self._tenancy = app, tenancy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_CLOSED) and CALLER not in scope:
            try:
                scope[CALLER] = await self._tenancy.authenticate(Headers(scope=scope))
            except ApiError as error:
                response = error_response(error, scope)
                response.headers["connection"] = "close"  # its body is not read
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
