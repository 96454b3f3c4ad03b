from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.actors.engine.conformance.asking import Start
from tests.actors.engine.conformance.engines import ENGINES, ENVIRONMENT

from raytide.actors.engine import EngineInfo
from raytide.actors.engine.base import Engine


@pytest.fixture(params=sorted(ENGINES))
async def start(
    request: pytest.FixtureRequest, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Start]:
    """Starts engines of one kind, and ends them after the test."""
    engines: list[Engine] = []
    for name, value in ENVIRONMENT.get(request.param, {}).items():
        monkeypatch.setenv(name, value)

    async def make(max_running: int = 8, max_waiting: int = 64) -> tuple[Engine, EngineInfo]:
        engine = ENGINES[request.param](model_dir, max_running, max_waiting)
        engines.append(engine)
        return engine, await engine.start()

    yield make
    for engine in engines:
        await engine.shutdown()
