"""The files and batches of one gateway process: their HTTP routes, and the work on batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request

from raytide.actors.serving.openai_api.admission import CALLER, BatchRow, caller_of
from raytide.actors.serving.openai_api.errors import ApiError, ErrorBody
from raytide.core.errors import RaytideError
from raytide.core.logs import logger
from raytide.core.telemetry.metrics import MetricSample
from raytide.gateway.batches.objects import BatchList, BatchObject, BatchRequest
from raytide.gateway.batches.runner import BatchRunner
from raytide.gateway.batches.store import BatchStore
from raytide.gateway.files.database import FileDatabase
from raytide.gateway.files.routes import Cursor, add_file_routes, team_of
from raytide.gateway.files.store import FileStore
from raytide.gateway.models import EndpointModels
from raytide.gateway.tenancy.tenancy import Tenancy

log = logger(__name__)

_MOST_LISTED = 100


class BatchService:
    """The files and batches of one gateway process. The constructor adds their routes to the gateway's app.

    `run` works on batches until it is cancelled.
    """

    def __init__(self, app: FastAPI, models: EndpointModels, tenancy: Tenancy, folder: Path) -> None:
        files = FileStore(FileDatabase(folder))
        self._batches = batches = BatchStore(files)
        add_file_routes(app, files)
        add_batch_routes(app, batches)
        self._models, self._tenancy = models, tenancy
        self._runner = BatchRunner(batches, app, self._scope_of, self._has_priority)

    async def samples(self) -> list[MetricSample]:
        """Returns the metrics of the batches. Every gateway process returns the same metrics, because the processes
        share the batches.
        """
        try:
            return await asyncio.to_thread(self._batches.samples)
        except RaytideError as error:  # a full disk or a lock: the rest of the page is shown all the same
            log.warning("the batches are not shown", extra={"error": str(error)})
            return []

    async def run(self) -> None:
        await self._models.listed.wait()  # a row whose model is not known yet would fail
        await self._runner.run()

    def _scope_of(self, account: str, row: BatchRow) -> dict[str, object]:
        """Returns the scope entries of a row's request: the row runs under the limits of the key that created the
        batch.
        """
        return {CALLER: self._tenancy.caller_of_account(account, row)}

    def _has_priority(self, model: str) -> bool:
        try:
            server, _ = self._models.endpoint(model)
        except ApiError:
            return False
        return server.is_described and "priority" in server.info.features


def add_batch_routes(app: FastAPI, batches: BatchStore) -> None:
    """Adds `/v1/batches`: create, list, retrieve and cancel."""

    @app.post("/v1/batches")
    def create_batch(body: BatchRequest, request: Request) -> BatchObject:
        return batches.create(body, team_of(request), caller_of(request.scope).account)

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
