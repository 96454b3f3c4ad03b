"""Starts a replica's engine process and owns it. The process ends when its owner ends, for whatever reason."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from raytide.actors.engine.backends.remote.client import RemoteEngine
from raytide.actors.engine.model.parallel.launcher import Invitation
from raytide.actors.gang.packages import interpreter_with
from raytide.core.errors import EngineDeadError, EngineError, from_json
from raytide.core.objects.endpoint import ServeSpec

_END_TIMEOUT_S = 10.0


class EngineChild:
    """A running engine process.

    `engine` is a connection to the process. Other processes can connect with `port` and `secret`. `metrics` is the
    address of the process's metrics page.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, engine: RemoteEngine, port: int, secret: str, metrics: str
    ) -> None:
        self._process, self.engine, self.port, self.secret, self.metrics = process, engine, port, secret, metrics

    @classmethod
    async def start(
        cls,
        spec: ServeSpec,
        host: str,
        name: str,
        *,
        model_dir: str,
        on_phase: Callable[[str], None] = lambda phase: None,
        bring_members: Callable[[Invitation], Awaitable[None]] | None = None,
        install: Callable[[Sequence[str]], Awaitable[str]] | None = None,
    ) -> EngineChild:
        """Starts the process and returns once its engine is ready.

        `on_phase` is called with each phase of the start. `bring_members` starts the replica's members on other nodes.
        `install` returns the path of a Python interpreter with the spec's packages. Raises the error with which the
        engine or a member failed to start. Raises EngineError if the process ended without reporting an error.
        """
        secret = secrets.token_hex(32)
        if spec.pip:
            on_phase("install")
        python = await (install(spec.pip) if install is not None else asyncio.to_thread(interpreter_with, spec.pip))
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                "-m",
                "raytide.actors.serving.engine_process",
                str(writing),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[writing],
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        try:
            assert process.stdin is not None
            fields = spec.model_dump(mode="json")
            order = {"spec": fields, "model_dir": model_dir, "host": host, "secret": secret, "replica": name}
            process.stdin.write(json.dumps(order).encode() + b"\n")
            answer = await _answer(reading, on_phase, bring_members)
            if "error" in answer:
                raise from_json(answer["error"])
            if "port" not in answer:
                code = await process.wait()
                raise EngineError(f"the engine's process ended with code {code} during its start.", hint="See its log.")
            engine = RemoteEngine(host, answer["port"], secret, name=name)
            await engine.start()
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
            raise
        return cls(process, engine, answer["port"], secret, answer["metrics"])

    def problem(self) -> str | None:
        """Returns why the engine is broken, or None."""
        try:
            return self.engine.status.problem
        except EngineDeadError as error:
            return str(error)

    def load(self) -> dict[str, float]:
        """Returns the engine's load counters and their age in seconds, as `age_s`. The age grows while the engine
        hangs.
        """
        status = self.engine.status
        return {**status.load, "age_s": time.monotonic() - status.at_s}

    async def stop(self, drain_s: float) -> None:
        """Waits at most `drain_s` seconds until the running requests have ended. Then ends the process."""
        with suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(drain_s + _END_TIMEOUT_S):
                await self.engine.drain(drain_s)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def _answer(
    fd: int,
    on_phase: Callable[[str], None],
    bring_members: Callable[[Invitation], Awaitable[None]] | None,
) -> dict[str, Any]:
    """Passes on the phases of the start and returns the message that ends them; empty if the pipe was closed."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    bringing: set[asyncio.Future[None]] = set()
    try:
        while line := await _read_line(reader, bringing):
            answer: dict[str, Any] = json.loads(line)
            if "members" in answer and bring_members is not None:
                bringing.add(asyncio.ensure_future(bring_members(Invitation(**answer["members"]))))
            elif "phase" not in answer:
                return answer
            else:
                on_phase(answer["phase"])
        return {}
    finally:
        for each in bringing:
            each.cancel()
        transport.close()


async def _read_line(reader: asyncio.StreamReader, bringing: set[asyncio.Future[None]]) -> bytes:
    """Returns the next line. Raises the error of a member that failed to start: the engine would wait for it."""
    reading = asyncio.ensure_future(reader.readline())
    try:
        while not reading.done():
            waiting: set[asyncio.Future[Any]] = {reading, *bringing}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in [each for each in bringing if each.done()]:
                bringing.discard(each)
                each.result()
        return reading.result()
    finally:
        reading.cancel()
