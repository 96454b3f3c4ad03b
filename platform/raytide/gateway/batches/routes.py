"""`/v1/batches`: create, list, retrieve and cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Query, Request

from raytide.actors.serving.openai_api.admission import RequestCaller, caller_of
from raytide.actors.serving.openai_api.errors import ErrorBody
from raytide.gateway.batches.objects import BatchList, BatchObject, BatchRequest
from raytide.gateway.batches.store import BatchStore
from raytide.gateway.files.routes import Cursor, team_of

__all__ = ["add_batch_routes"]

_MOST_LISTED = 100


def add_batch_routes(app: FastAPI, batches: BatchStore, account_of: Callable[[RequestCaller], str]) -> None:
    """`account_of` returns the account of a caller's API key; "" for a caller without one."""

    @app.post("/v1/batches")
    def create_batch(body: BatchRequest, request: Request) -> BatchObject:
        return batches.create(body, team_of(request), account_of(caller_of(request.scope)))

    @app.get("/v1/batches")
    def list_batches(
        request: Request, after: Cursor = None, limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 20
    ) -> BatchList:
        return batches.page(team_of(request), after=after, limit=limit)

    @app.get("/v1/batches/{batch_id}")
    def retrieve_batch(batch_id: str, request: Request) -> BatchObject:
        return batches.get(team_of(request), batch_id)

    @app.post("/v1/batches/{batch_id}/cancel", responses={409: {"model": ErrorBody}})
    def cancel_batch(batch_id: str, request: Request) -> BatchObject:
        return batches.cancel(team_of(request), batch_id)
