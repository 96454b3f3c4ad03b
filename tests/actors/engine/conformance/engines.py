"""The engines of the conformance suite: makes a small one of each, with one place and little room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raytide.actors.engine import EngineConfig, EngineInfo, FakeEngine, NativeEngine
from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.backends.remote.server import EngineServer
from raytide.actors.engine.base import Engine

MAX_LEN = 128


def fake(model_dir: Path, max_running: int, max_waiting: int) -> Engine:
    return FakeEngine(max_model_len=MAX_LEN, max_running=max_running, max_waiting=max_waiting)


def native(model_dir: Path, max_running: int, max_waiting: int) -> Engine:
    return NativeEngine(
        EngineConfig(
            model_dir=str(model_dir),
            max_model_len=MAX_LEN,
            block_size=8,
            max_running=max_running,
            max_waiting=max_waiting,
            max_batch_tokens=max(64, max_running),
            speculation="off",  # tests of queues need answers that last
        )
    )


class Remote(RemoteEngine):
    """A native engine behind a real socket."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.server: EngineServer

    async def start(self) -> EngineInfo:
        self.server = EngineServer(self._inner, await self._inner.start(), "secret", problem=_no_problem)
        super().__init__("127.0.0.1", await self.server.listen("127.0.0.1"), "secret")
        return await super().start()

    async def shutdown(self) -> None:
        if hasattr(self, "server"):
            await super().shutdown()
            await self.server.close()
        await self._inner.shutdown()


async def _no_problem() -> None:
    return None


def remote(model_dir: Path, max_running: int, max_waiting: int) -> Engine:
    return Remote(native(model_dir, max_running, max_waiting))


# vLLM, which tests share, is made by a fixture of its own.
ENGINES: dict[str, Callable[[Path, int, int], Engine]] = {
    "fake": fake,
    "native": native,
    "native-ref": native,
    "remote": remote,
}
ENVIRONMENT: dict[str, dict[str, str]] = {"native-ref": {"RAYTIDE_OPS": "ref"}}  # while an engine starts
