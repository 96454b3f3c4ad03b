"""A gateway process without Ray: `python gateway_process.py FOLDER PORT ENGINE_PORTS API`, with one model `fake`.

ENGINE_PORTS are separated by commas. API is the address of a control API that knows the token "gateway", or empty.
"""

from __future__ import annotations

import asyncio
import os
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
    folder, port, api = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
    addresses = {f"r{each}": ReplicaAddress("127.0.0.1", int(each), "secret") for each in sys.argv[3].split(",")}
    models = EndpointModels("test")

    async def run() -> AsyncIterator[None]:
        models.update({"fake": EndpointEntry(ServeSpec(name="fake", model="unused"), 1.0, addresses)})
        if api:
            tenancy.start()
            await tenancy.keys.synced.wait()
        task = asyncio.create_task(batches.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await models.close()
        if api:
            await tenancy.close()

    control = ControlApi(api or "http://127.0.0.1:9", "gateway", f"test-{os.getpid()}")
    tenancy = Tenancy(control, requires_keys=bool(api), shared=folder.parent if api else None)
    app = create_app(models, tenancy, run)
    batches = BatchService(app, models, tenancy, folder)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
