"""An engine in a thread of the test, which counts what it runs, and gateway processes in front of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn
from openai import OpenAI
from tests.gateway.tenancy.conftest import Line
from tests.stores import new_store

from raytide.actors.engine import FakeEngine
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.types import GenChunk, GenRequest
from raytide.core.io.process import free_port
from raytide.core.objects.api_key import KeySpec, UsageRow, digest_of_secret, new_secret
from raytide.core.state.tenancy.usage import UsageFilter

ROOT = Path(__file__).parents[3]


class CountingEngine(FakeEngine):
    """Notes the prompt and the priority of each request that it has answered or begun."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.began: list[str] = []
        self.priorities: set[int] = set()

    async def generate(self, request: GenRequest) -> AsyncIterator[GenChunk]:  # type: ignore[override]
        self.began.append(bytes(request.prompt).decode())
        self.priorities.add(request.priority)
        async for chunk in super().generate(request):
            yield chunk


class ServedEngine:
    """An engine behind a socket, in an event loop of its own thread."""

    def __init__(self, engine: CountingEngine) -> None:
        self.engine, self.port = engine, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)

    async def _start(self) -> int:
        async def no_problem() -> None:
            return None

        self._server = EngineServer(self.engine, await self.engine.start(), "secret", problem=no_problem)
        return await self._server.listen("127.0.0.1")

    def close(self) -> None:
        async def end() -> None:
            await self._server.close()
            await self.engine.shutdown()
            await asyncio.sleep(0.1)  # the server's cancelled tasks end

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


class GatewayProcess:
    def __init__(self, folder: Path, engine_ports: list[int], api: str, key: str) -> None:
        port = free_port()
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
        script = Path(__file__).with_name("gateway_process.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(port), ",".join(map(str, engine_ports)), api],
            env=environment,
        )
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=key,
            max_retries=0,
            timeout=120,
            _strict_response_validation=True,
        )
        self._port = port

    def wait_ready(self) -> None:
        def is_open() -> bool:
            assert self.process.poll() is None, "the gateway ended"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self._port)) == 0

        until("the gateway", is_open)

    def has_open(self, file: Path) -> bool:
        for place in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(place) == str(file):
                    return True
        return False

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait(60)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise


def until(what: str, holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)


class BilledGateways:
    """Gateway processes in front of two engines and of a control API, whose ledger has the requests of one key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines = [ServedEngine(CountingEngine(tokens_per_s=200.0)) for _ in range(2)]
        self.store, self.key = new_store(folder), new_secret()
        self.store.tenancy.keys.create(KeySpec(name="web"), "ana", digest_of_secret(self.key), 1.0)
        app = Line(self.store, folder).app
        self._server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until("the control API", lambda: self._server.started)
        self._api = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self._started: list[GatewayProcess] = []

    def start(self) -> GatewayProcess:
        ports = [each.port for each in self.engines]
        self._started.append(gateway := GatewayProcess(self.folder / "files", ports, self._api, self.key))
        gateway.wait_ready()
        return gateway

    def ledger(self) -> list[UsageRow]:
        rows: list[UsageRow] = []
        before = None
        while True:
            page, before = self.store.tenancy.usage.rows(UsageFilter(), before=before, limit=1000)
            rows += page
            if before is None:
                return rows

    def close(self) -> None:
        for gateway in self._started:
            gateway.close()
        for engine in self.engines:
            engine.close()
        self._server.should_exit = True
        self._thread.join(60)
        self.store.close()


@pytest.fixture
def billed(tmp_path: Path) -> Iterator[BilledGateways]:
    made = BilledGateways(tmp_path)
    yield made
    made.close()


@pytest.fixture
def served() -> Iterator[ServedEngine]:
    engine = ServedEngine(CountingEngine(tokens_per_s=200.0, fail_on="broken"))
    yield engine
    engine.close()


@pytest.fixture
def gateways(served: ServedEngine, tmp_path: Path) -> Iterator[Callable[[], GatewayProcess]]:
    """Starts a gateway process over the same folder; all are ended after the test."""
    started: list[GatewayProcess] = []

    def start() -> GatewayProcess:
        started.append(gateway := GatewayProcess(tmp_path / "files", [served.port], "", "none"))
        gateway.wait_ready()
        return gateway

    yield start
    for gateway in started:
        gateway.close()
