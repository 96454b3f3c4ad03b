"""Middleware that finds out who sends a request, before its body is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from raytide.actors.serving.http.app import error_response
from raytide.actors.serving.openai_api.admission import CALLER
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.gateway.tenancy.tenancy import Tenancy

__all__ = ["Authentication"]

_CLOSED = ("/v1/", "/v2/", "/metrics", "/tokenize", "/detokenize", "/score", "/rerank")


class Authentication:
    """Authenticates requests for `/v1/...`, `/v2/...`, `/metrics`, and those of vLLM's routes that compute. It refuses
    those without a valid key as OpenAI or Anthropic does.

    It belongs inside the middleware that takes the endpoint's name from the path. Other paths, such as `/health`, stay
    open, and so do requests that come with a caller: rows of batches, which come from this process.
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
