"""The routes of the web page. The page's files need no token. The page's data needs a token."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from anyio import CapacityLimiter
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from raytide.control.api import queries as q
from raytide.control.api.auth import Tokens
from raytide.control.api.services.service import ApiService
from raytide.control.views import to_json
from raytide.core.errors import NotFoundError
from raytide.dashboards.web import bundle
from raytide.dashboards.web.stream import EventStream, Streams

FILES = "/page/"
"""The path of the page's files; `/` is the page itself."""

Since = Annotated[float, Query(ge=60, le=32 * 86_400, allow_inf_nan=False)]
Step = Annotated[float, Query(ge=60, le=86_400, allow_inf_nan=False)]
At = Annotated[float, Query(ge=0, le=1e11, allow_inf_nan=False)]
_MOST = 1000


def page_routes(service: ApiService, tokens: Tokens) -> APIRouter:
    router = APIRouter()
    slow = CapacityLimiter(2)
    streams = Streams(service.pictures.take)

    @router.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return _file(bundle.ENTRY, request)

    @router.get(FILES + "{name:path}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return _file(name, request)

    async def stream(request: Request) -> EventStream:
        caller = request.state.caller
        authorization = request.headers.get("authorization")
        hello = {
            "user": caller.user,
            "team": caller.team,
            "page": bundle.version(),
            "at_s": service.now_s(),
            "types": service.pictures.types(),
        }
        return EventStream(streams, caller.team, hello, partial(tokens.caller, authorization))

    router.add_route("/v1/stream", stream, methods=["GET"])

    @router.get("/v1/tide")
    async def tide(caller: q.CallerInput, since_s: Since = 86_400.0, step_s: Step = 900.0) -> Any:
        return to_json(await q.in_pool(slow, service.tide.view, caller, since_s, step_s))

    @router.get("/v1/fleet")
    async def fleet(caller: q.CallerInput, at_s: At) -> Any:
        return await q.in_pool(slow, service.fleet, caller, at_s)

    @router.get("/v1/ledger")
    def ledger(
        caller: q.CallerInput,
        subject: q.Word = None,
        node: q.Word = None,
        until_s: q.Until = None,
        limit: q.Limit = 100,
    ) -> Any:
        found = service.ledger(caller, subject=subject, node_id=node, until_s=until_s, limit=min(limit, _MOST))
        return [to_json(entry) for entry in found]

    return router


def _file(name: str, request: Request) -> Response:
    found = bundle.bundle().get(name)
    if found is None:
        raise NotFoundError(f"the page has no file {name[:100]}.", hint="`./dev page` builds the page.")
    headers = found.headers()
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.compressed, headers={**headers, "Content-Encoding": "gzip"})
    return Response(found.body, headers=headers)
