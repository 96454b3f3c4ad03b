"""`/v1/batches`: create, list, retrieve and cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request

from raytide.gateway.batches.objects import BatchList, BatchObject, BatchRequest
from raytide.gateway.batches.store import BatchStore
from raytide.gateway.files.routes import Cursor, team_of

__all__ = ["add_batch_routes"]

_MOST_LISTED = 100


def add_batch_routes(app: FastAPI, batches: BatchStore) -> None:
    @app.post("/v1/batches")
    def create_batch(body: BatchRequest, request: Request) -> BatchObject:
        key = getattr(request.scope.get("raytide.caller"), "key", None)
        return batches.create(body, team_of(request), "" if key is None else key.account)

    @app.get("/v1/batches")
    def list_batches(
        request: Request, after: Cursor = None, limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = 20
    ) -> BatchList:
        return batches.page(team_of(request), after=after, limit=limit)

    @app.get("/v1/batches/{batch_id}")
    def retrieve_batch(batch_id: str, request: Request) -> BatchObject:
        return batches.get(team_of(request), batch_id)

    @app.post("/v1/batches/{batch_id}/cancel")
    def cancel_batch(batch_id: str, request: Request) -> BatchObject:
        return batches.cancel(team_of(request), batch_id)
