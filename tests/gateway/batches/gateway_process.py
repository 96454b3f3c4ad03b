"""A gateway process without Ray: `python gateway_process.py FOLDER PORT ENGINE_PORT`, with one model `fake`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn

from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway.app import create_app
from raytide.gateway.batches.service import BatchService
from raytide.gateway.models import EndpointModels
from raytide.gateway.replicas.directory import EndpointEntry
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import Tenancy

if __name__ == "__main__":
    folder, port, engine_port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    models = EndpointModels("test")

    async def run() -> AsyncIterator[None]:
        entry = EndpointEntry(ServeSpec(name="fake", model="unused"), 1.0)
        entry = EndpointEntry(entry.spec, 1.0, {"r1": ReplicaAddress("127.0.0.1", engine_port, "secret")})
        models.update({"fake": entry})
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    nobody = Tenancy(ControlApi("http://127.0.0.1:9", "", "test"), requires_keys=False)
    app = create_app(models, nobody, run)
    batches = BatchService(app, models, nobody, folder)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
