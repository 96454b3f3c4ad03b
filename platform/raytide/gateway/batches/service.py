"""Files and batches of one gateway process: their routes, and the work on batches."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from raytide.actors.serving.openai_api.admission import CALLER, RequestCaller
from raytide.actors.serving.openai_api.errors import ApiError
from raytide.gateway.batches.routes import add_batch_routes
from raytide.gateway.batches.runner import BatchRunner
from raytide.gateway.batches.store import BatchStore
from raytide.gateway.files.database import FileDatabase
from raytide.gateway.files.routes import add_file_routes
from raytide.gateway.files.store import FileStore
from raytide.gateway.models import EndpointModels
from raytide.gateway.tenancy.tenancy import Tenancy

__all__ = ["BatchService"]


class BatchService:
    """Adds the routes to the gateway's app. `run` works on batches until it is cancelled."""

    def __init__(
        self,
        app: FastAPI,
        models: EndpointModels,
        tenancy: Tenancy,
        folder: Path,
    ) -> None:
        files = FileStore(FileDatabase(folder))
        batches = BatchStore(files)
        add_file_routes(app, files)
        add_batch_routes(app, batches, _account_of)
        self._models, self._tenancy = models, tenancy
        self._runner = BatchRunner(batches, app, self._scope_of, self._has_priority)

    async def run(self) -> None:
        await self._models.listed.wait()  # a row whose model is not known yet would fail
        await self._runner.run()

    def _scope_of(self, account: str) -> dict[str, object]:
        """Returns what a row's request has in its scope: a row runs under the limits of the batch's key."""
        return {CALLER: self._tenancy.caller_of_account(account)}

    def _has_priority(self, model: str) -> bool:
        try:
            server, _ = self._models.endpoint(model)
        except ApiError:
            return False
        return server.is_described and "priority" in server.info.features


def _account_of(caller: RequestCaller) -> str:
    return caller.account
