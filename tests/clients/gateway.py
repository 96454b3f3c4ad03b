"""A gateway without Ray for clients: `python gateway.py MODEL_DIR` prints its base URL and API keys, and serves until
stdin ends.

Models: `tiny`, the model of the folder on two replicas of the native engine; `caller`, a fake one that always writes
CALL; `agent`, a fake one that calls the tool `weather` and, given RESULT, repeats it; `talker`, a fake one that always
says "tide".

Keys are checked, but not demanded: `limited` of the team blue has three requests a minute and 10,000 tokens, `scoped`
may use `talker` alone, and the budget of `poor` has room for short answers of `talker` only.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import uvicorn
from tests.gateway.tenancy.conftest import Line
from tests.stores import new_store

from raytide.actors.engine import EngineConfig, FakeEngine, NativeEngine
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.base import Engine
from raytide.actors.engine.types import GenRequest
from raytide.actors.serving.http.protocol import BoundedHttpTools
from raytide.actors.serving.ray_serve.keys import ReplicaAddress
from raytide.core.objects.api_key import KeySpec, TokenPrice, digest_of_secret, new_secret
from raytide.core.objects.endpoint import ServeSpec
from raytide.core.state import Store
from raytide.gateway.answers.stored_responses import SharedResponses
from raytide.gateway.app import create_app
from raytide.gateway.batches.service import BatchService
from raytide.gateway.models import EndpointModels
from raytide.gateway.replicas.directory import EndpointEntry, Listing
from raytide.gateway.tenancy.tenancy import Tenancy

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
END = "<END>"
RESULT = "rain in Oslo"
HOST, SECRET = "127.0.0.1", "secret"


class AgentEngine(FakeEngine):
    def _admit(self, request: GenRequest) -> object:  # type: ignore[override]
        prompt = bytes(token % 256 for token in request.prompt)
        answer = f"The tool says: {RESULT}." if RESULT.encode() in prompt else CALL
        self._reply = (answer + END).encode()
        sampling = replace(request.sampling, stop=(*request.sampling.stop, END))
        return super()._admit(replace(request, sampling=sampling))


async def replica(engine: Engine) -> ReplicaAddress:
    server = EngineServer(engine, await engine.start(), SECRET, problem=no_problem)
    return ReplicaAddress(HOST, await server.listen(HOST), SECRET)


async def no_problem() -> None:
    return None


async def listing(model_dir: str) -> Listing:
    """Starts the engines and returns where they are."""
    config = EngineConfig(model_dir=model_dir, device="cpu", deterministic=True, kv_memory_gb=0.1)
    engines: dict[str, list[Engine]] = {
        "tiny": [NativeEngine(config), NativeEngine(config)],
        "agent": [AgentEngine(max_model_len=1 << 16)],
        "caller": [FakeEngine(reply=CALL + END)],
        "talker": [FakeEngine(tokens_per_s=500.0)],
    }
    found: Listing = {}
    for name, replicas in engines.items():
        addresses = {f"{name}-{index}": await replica(engine) for index, engine in enumerate(replicas)}
        found[name] = EndpointEntry(ServeSpec(name=name, model=model_dir), time.time(), addresses)
    return found


def key_of(store: Store, **fields: object) -> str:
    secret = new_secret()
    store.tenancy.keys.create(KeySpec.model_validate(fields), "ana", digest_of_secret(secret), time.time())
    return secret


async def serve(model_dir: str, files: str) -> None:
    found, models = await listing(model_dir), EndpointModels("clients")

    async def run() -> AsyncIterator[None]:
        models.update(found)
        tenancy.start()
        await tenancy.keys.synced.wait()
        running = asyncio.create_task(batches.run())
        yield
        running.cancel()
        await models.close()
        await tenancy.close()

    store = new_store(Path(files))
    store.save_endpoint(ServeSpec(name="talker", model=model_dir, price=TokenPrice(completion=1000.0)), "ana", 1.0)
    keys = {
        "limited": key_of(store, name="limited", team="blue", requests_per_min=3, tokens_per_min=10_000),
        "scoped": key_of(store, name="scoped", models=["talker"]),
        "poor": key_of(store, name="poor", budget={"usd": 0.02}),
    }
    tenancy = Tenancy(Line(store, Path(files)).api(), requires_keys=False)
    app = create_app(models, tenancy, run, responses=SharedResponses(Path(files) / "responses"))
    batches = BatchService(app, models, tenancy, Path(files))
    config = uvicorn.Config(app, HOST, 0, http=BoundedHttpTools, log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    url = f"http://{HOST}:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    sys.stdout.write(f"{url}\n{json.dumps(keys)}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(sys.argv[1], folder))
