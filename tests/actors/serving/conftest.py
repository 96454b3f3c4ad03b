"""A real HTTP server around an engine, in a thread, for clients that block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from openai import OpenAI

from raytide.actors.engine.base import Engine
from raytide.actors.serving.http.app import create_app
from raytide.actors.serving.openai_api.server import Server


@contextmanager
def serving(engine: Engine, model: str) -> Iterator[str]:
    """The base URL of a running uvicorn whose port the system chose."""
    app = create_app(Server(engine, model=model, drain_s=1.0))
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn did not start"
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


@pytest.fixture
def serve() -> Iterator[Callable[[Engine], str]]:
    """Start a server for an engine; all are stopped at the end of the test."""
    with ExitStack() as stack:
        yield lambda engine, model="fake": stack.enter_context(serving(engine, model))


@pytest.fixture
def client_of() -> Callable[[str], OpenAI]:
    return lambda url: OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120, _strict_response_validation=True
    )
