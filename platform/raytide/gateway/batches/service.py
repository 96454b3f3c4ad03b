"""Files and batches of one gateway process: their routes, and the work on batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from raytide.actors.serving.openai_api.errors import ApiError
from raytide.gateway.batches.routes import add_batch_routes
from raytide.gateway.batches.runner import BatchRunner
from raytide.gateway.batches.store import BatchStore
from raytide.gateway.files.database import Database
from raytide.gateway.files.routes import add_file_routes
from raytide.gateway.files.store import FileLimits, FileStore
from raytide.gateway.models import EndpointModels

__all__ = ["BatchService"]

ScopeOf = Callable[[str, str], Mapping[str, Any]]


class BatchService:
    """Adds the routes to the gateway's app. `run` works on batches until it is cancelled."""

    def __init__(
        self,
        app: FastAPI,
        models: EndpointModels,
        folder: Path,
        *,
        limits: FileLimits | None = None,
        scope_of: ScopeOf = lambda team, account: {},
    ) -> None:
        """`scope_of(team, account)` gives the entries of the ASGI scope with which the rows of a batch run."""
        files = FileStore(Database(folder), limits)
        batches = BatchStore(files)
        add_file_routes(app, files)
        add_batch_routes(app, batches)
        self._models = models
        self._runner = BatchRunner(batches, app, scope_of, self._has_priority)

    async def run(self) -> None:
        await self._models.listed.wait()  # a row whose model is not known yet would fail
        await self._runner.run()

    def _has_priority(self, model: str) -> bool:
        try:
            server, _ = self._models.endpoint(model)
        except ApiError:
            return False
        return server.is_described and "priority" in server.info.features
