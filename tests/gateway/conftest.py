"""A gateway's app over engines of this process, each behind a real socket, without Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from raytide.actors.engine.backends.remote import client
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.base import Engine
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.endpoint import ServeSpec
from raytide.gateway.app import create_app
from raytide.gateway.hosted import HostedApis
from raytide.gateway.models import EndpointModels
from raytide.gateway.replicas.directory import EndpointEntry
from raytide.gateway.tenancy import budgets
from raytide.gateway.tenancy.control_api import ControlApi
from raytide.gateway.tenancy.tenancy import Tenancy
from raytide.gateway.tenancy.usage import UsageReporter
from raytide.gateway.tracing import RequestTracing

SECRET = "secret"


@pytest.fixture(autouse=True)
def the_api_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it answers late: requests wait for it, and a gateway that closes has time for its reports."""
    monkeypatch.setattr(budgets, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(UsageReporter.close, "__defaults__", (60.0,))


@pytest.fixture(autouse=True)
def no_replica_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are in the gateway's event loop: when it stands still, they are silent too, and are not lost."""
    monkeypatch.setattr(client, "_SILENCE_S", 600.0)


@dataclass
class Gateway:
    """One gateway with the endpoints that a test deploys. `http` is a client of its app."""

    http: httpx.AsyncClient
    app: FastAPI
    models: EndpointModels
    tenancy: Tenancy
    listing: dict[str, EndpointEntry] = field(default_factory=dict)
    servers: dict[str, EngineServer] = field(default_factory=dict)
    _made: Counter[str] = field(default_factory=Counter)

    async def deploy(self, name: str, *engines: Engine, **spec: object) -> None:
        """Adds replicas `NAME-0`, `NAME-1`... with these engines, and waits until they take requests."""
        addresses = dict(self.listing[name].replicas) if name in self.listing else {}
        for engine in engines:
            replica = f"{name}-{self._made[name]}"
            self._made[name] += 1
            addresses[replica] = await self.start(replica, engine)
        self.listing[name] = EndpointEntry(ServeSpec(**{"name": name, "model": "/models/none", **spec}), 1.0, addresses)  # type: ignore[arg-type]
        self.models.update(self.listing)
        replicas = self.models.endpoint(name)[1]

        async def are_ready() -> bool:
            return len(replicas.ready) == len(addresses)

        await until(are_ready)

    async def start(self, replica: str, engine: Engine) -> ReplicaAddress:
        """Starts the process of a replica, which is none here, and returns its address."""
        server = self.servers[replica] = EngineServer(engine, await engine.start(), SECRET, problem=_no_problem)
        return ReplicaAddress("127.0.0.1", await server.listen("127.0.0.1"), SECRET)

    async def kill(self, replica: str) -> None:
        """Ends a replica as SIGKILL would, for those who are connected to it."""
        server = self.servers.pop(replica)
        for connection in list(server._connections):
            connection._transport.abort()
        await server.close()
        name = replica.rpartition("-")[0]
        entry = self.listing[name]
        left = {other: address for other, address in entry.replicas.items() if other != replica}
        self.listing[name] = dataclasses.replace(entry, replicas=left)
        self.models.update(self.listing)

    async def close(self) -> None:
        await self.models.close()
        for server in self.servers.values():
            await server.close()


@asynccontextmanager
async def running_gateway(
    *,
    requires_keys: bool = False,
    api: ControlApi | None = None,
    beside: Gateway | None = None,
    shared: Path | None = None,
    hosted: HostedApis | None = None,
    tracing: RequestTracing | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway; with an `api`, it knows the keys there. One `beside` another has the same replicas; `shared` is the
    folder that it has in common with others.
    """
    async with AsyncExitStack() as stack:
        models = EndpointModels("test", hosted)
        tenancy = Tenancy(
            api or ControlApi("http://127.0.0.1:9", "", "test"), requires_keys=requires_keys, shared=shared
        )
        if api is not None:
            tenancy.start()
            await asyncio.wait_for(tenancy.keys.synced.wait(), 60)
        app = create_app(models, tenancy, _nothing, tracing)
        transport = httpx.ASGITransport(app=app)
        http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://gateway"))
        gateway = Gateway(http, app, models, tenancy)
        stack.push_async_callback(tenancy.close)
        stack.push_async_callback(gateway.close)
        if beside is not None:
            gateway.listing = beside.listing
            models.update(gateway.listing)
        yield gateway


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    deadline_s = time.monotonic() + 60.0
    while not await holds():
        assert time.monotonic() < deadline_s, "waited for 60 s"
        await asyncio.sleep(0.01)


async def _no_problem() -> None:
    return None


async def _nothing() -> AsyncIterator[None]:
    yield
